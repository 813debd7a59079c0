"""Files that commands write."""

import os
from pathlib import Path


def require_writable(option: str, path: str | None) -> None:
    """Find out before the work whether its result can be kept at `path`; None and "-" are no files."""
    if path in (None, "-"):
        return
    target = Path(path).resolve()  # of a link that points to nothing yet, what it points to
    existed = target.exists()
    try:
        with target.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"{option} is {path!r}, which cannot be written: {error.strerror}") from None
    if not existed:
        target.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or, where that is interrupted, not at all. A link stays one; a device or a pipe is only written to."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)
