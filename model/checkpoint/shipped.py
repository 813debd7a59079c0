"""EAGLE-3 heads that come with this package, by the name of their target."""

from pathlib import Path

from stepgraph.model.checkpoint.errors import CheckpointError

SHIPPED_FOLDER = Path(__file__).parents[1] / "heads"


def has_shipped_head(target_name: str) -> bool:
    return (SHIPPED_FOLDER / target_name / "config.json").exists()


def shipped_head(target_name: str) -> Path:
    """The folder of the head that comes with this package for a target.

    Raises:
        CheckpointError: there is none.
    """
    if has_shipped_head(target_name):
        return SHIPPED_FOLDER / target_name
    names = sorted(path.parent.name for path in SHIPPED_FOLDER.glob("*/config.json"))
    shipped = f"the ones shipped are for {', '.join(names)}" if names else "none is shipped"
    raise CheckpointError(
        f"there is no EAGLE-3 head for {target_name!r}: {shipped}; give eagle3:DIRECTORY (in a hybrid, "
        "hybrid:MIN:eagle3:DIRECTORY or hybrid:MIN:early-exit:N), or eagle3:random for timing"
    )
