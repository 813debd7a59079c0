"""Files that commands write."""

import os
from pathlib import Path


def require_writable(option: str, path: str | None) -> None:
    """Find out before the work whether its result can be kept at `path`; None and "-" are no files."""
    if path in (None, "-"):
        return
    target = Path(path)
    existed = target.exists()
    try:
        with target.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"{option} is {path!r}, which cannot be written: {error.strerror}") from None
    if not existed:
        target.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or, where that is interrupted, not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
