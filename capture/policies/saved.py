"""Checks of a policy's saved state: a file that may have been edited, cut short, or written for other settings.

A value that is wrong is named when the state is read, since it would otherwise surface steps later, or steer k in silence.
"""

from collections.abc import Mapping
from typing import Any

from stepgraph.capture.policies.adaptive import checked_number
from stepgraph.capture.schedule import show

# Counts are forgotten or grow by a batch a step, so nothing that was counted comes near.
MOST = 1e15


def saved_object(name: str, value: Any) -> Mapping[str, Any]:
    """`value` when it is an object of names and values; a ValueError otherwise."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} in the saved state is {show(value)}; it must be an object.")
    return value


def saved_list(name: str, value: Any, length: int) -> list[Any]:
    """`value` when it is a list of `length`; a ValueError otherwise."""
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ValueError(f"{name} in the saved state is {show(value)}; it must be a list of {length}.")
    return list(value)


def saved_counts(name: str, value: Any, length: int, most: float = MOST) -> list[float]:
    """`length` numbers from 0 to `most`; a ValueError for anything else."""
    return [checked_number(f"a number of {name} in the saved state", each, 0, most) for each in saved_list(name, value, length)]


def saved_key(name: str, value: str) -> int:
    """The number that is a key of `name`, which JSON keeps as text."""
    if not (isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19):
        raise ValueError(f"a key of {name} in the saved state is {show(value)}; it must be the text of an integer from 0.")
    return int(value)


def saved_rates(name: str, accepted: Any, reached: Any, length: int) -> tuple[list[float], list[float]]:
    """Counts of drafts by position: those accepted, and those reached, of which the former are a part."""
    parts, wholes = saved_counts(name, accepted, length), saved_counts(name, reached, length)
    for part, whole in zip(parts, wholes, strict=True):
        if part > whole:
            raise ValueError(f"{name} in the saved state has {part:g} accepted of {whole:g} drafts; there cannot be more.")
    return parts, wholes
