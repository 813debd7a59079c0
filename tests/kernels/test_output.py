"""Files that commands write: whole, where a link points, and into what is no file."""

import os

import pytest

from stepgraph.kernels.output import write_whole


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half of it \ud800")
    assert path.read_text() == "new"


def test_a_link_stays_one(tmp_path):
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("old")
    link.symlink_to(kept)
    write_whole(link, "new")
    assert link.is_symlink()
    assert kept.read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"kept.json", "link.json"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_only_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "rows")
    assert pipe.is_fifo()
    assert os.read(reader, 100) == b"rows"
    os.close(reader)
