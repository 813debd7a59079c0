"""Frozen launch configurations, one JSON file per kernel family; nothing on a launch path measures anything.

A file holds `entries`, each with the keys it matches (`"match"`: a value, or `[low, high]` for a range of integers) and the
fields it sets. All entries that match apply in file order, later ones override earlier ones. Fields listed under `"bits"`
decide the order of the arithmetic, so an entry that sets one must not match on a field under `"not_bits"` (such as the query
length): a row's bits may not depend on it.
"""

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


def path_of(table: str) -> Path:
    return FOLDER / f"{table}.json"


@cache
def load(table: str) -> dict:
    """The parsed table, checked."""
    content = json.loads(path_of(table).read_text())
    check(table, content)
    return content


def check(table: str, content: dict) -> None:
    """Raise where an entry lets a row's bits depend on what they must not depend on."""
    for entry in content["entries"]:
        bits, keys = set(entry["config"]) & set(content["bits"]), set(entry["match"]) & set(content["not_bits"])
        if bits and keys:
            raise ValueError(f"table {table}: {sorted(bits)} decide a row's bits and may not be keyed by {sorted(keys)}")


@cache
def lookup(table: str, **key) -> dict:
    """The configuration for `key`, e.g. `lookup("attention", arch=90, group=4, head_dim=128, …)`."""
    config = {}
    for entry in load(table)["entries"]:
        if all(_matches(key[field], wanted) for field, wanted in entry["match"].items()):
            config.update(entry["config"])
    return config


def _matches(value, wanted) -> bool:
    if isinstance(wanted, list):
        low, high = wanted
        return low <= value <= high
    return value == wanted
