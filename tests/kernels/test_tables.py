"""Frozen configuration tables: every file is valid, and none can make a row's bits depend on what they must not."""

import json

import pytest

from stepgraph.kernels import tables

NAMES = sorted(path.stem for path in tables.FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_table_is_valid_and_says_where_it_comes_from(name):
    assert tables.load(name)["provenance"]["method"]


def test_later_entries_override_earlier_ones(tmp_path, monkeypatch):
    entries = [
        {"match": {}, "config": {"a": 1, "b": 1}},
        {"match": {"group": [2, 4]}, "config": {"a": 2}},
        {"match": {"group": 4, "arch": 90}, "config": {"b": 3}},
    ]
    (tmp_path / "sample.json").write_text(json.dumps({"bits": [], "not_bits": [], "entries": entries}))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    assert tables.lookup("sample", group=1, arch=90) == {"a": 1, "b": 1}
    assert tables.lookup("sample", group=4, arch=90) == {"a": 2, "b": 3}


def test_bits_may_not_be_keyed_by_query_length():
    entry = {"match": {"query_len": 4}, "config": {"rows": 32}}
    content = {"bits": ["rows"], "not_bits": ["query_len"], "entries": [entry]}
    with pytest.raises(ValueError, match="rows"):
        tables.check("sample", content)
