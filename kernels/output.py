"""Files that commands write."""

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
