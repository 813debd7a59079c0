"""One k for every step."""

from collections.abc import Sequence
from typing import Any, Self

from stepgraph.capture.keys import MAX_BATCH, KeySet, reachable_keys
from stepgraph.capture.schedule import DEFAULT_MAX_K, require_int


class FixedPolicy:
    """`k = const`; k = 0 is plain decoding.

    Args:
        k: draft tokens of every step, 0..max_k.
        max_k: largest k allowed.
    """

    kind = "fixed"

    def __init__(self, k: int, max_k: int = DEFAULT_MAX_K):
        require_int("max_k", max_k, 0)
        self.k = require_int("k", k, 0, max_k)
        self.max_k = max_k

    @property
    def ks(self) -> frozenset[int]:
        return frozenset((self.k,))

    def reachable(self, max_batch: int) -> set[tuple[int, int]]:
        return {(n, self.k) for n in range(1, require_int("max_batch", max_batch, 1, MAX_BATCH) + 1)}

    def keys(self, max_batch: int, rungs: Sequence[int] | None = None) -> KeySet:
        return reachable_keys(self.reachable(max_batch), max_batch, rungs)

    def choose(self, batch: int, context: int | None = None, requests: Sequence[int] | None = None) -> int:
        require_int("batch", batch, 1)
        return self.k

    def observe(self, k_run: int, accepted: Sequence[int], lag: int = 0, requests: Sequence[int] | None = None) -> None:
        """Nothing to learn."""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "k": self.k, "max_k": self.max_k}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(data["k"], data["max_k"])

    def __repr__(self) -> str:
        return f"FixedPolicy(k={self.k})"
