"""What the engine asks of whoever chooses k."""

from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

from stepgraph.capture.keys import KeySet


@runtime_checkable
class KPolicy(Protocol):
    """Chooses the draft tokens of each step, and learns from what was accepted.

    A policy is pure Python, so that the simulator runs the very object the engine runs, and its state is JSON-able, so that
    a run can be saved and replayed. It may answer only with a k for which `reachable` promised the pair (batch, k).
    """

    @property
    def ks(self) -> frozenset[int]:
        """Every k this policy may ask for, at any batch size. `{0}` means that the drafter never drafts."""
        ...

    def reachable(self, max_batch: int) -> set[tuple[int, int]]:
        """Every (batch, k) that `choose` can give for batch sizes 1..max_batch, in any order of batch sizes."""
        ...

    def keys(self, max_batch: int, rungs: Sequence[int] | None = None) -> KeySet:
        """Graph keys in which every reachable (batch, k) has a bucket ≥ batch.

        Args:
            max_batch: largest live batch, in requests.
            rungs: ascending bucket sizes, `default_rungs` if None.
        """
        ...

    def choose(self, batch: int, context: int | None = None, requests: Sequence[int] | None = None) -> int:
        """k of the next step; call it once per step.

        Args:
            batch: decoding requests in the step. Prefilling requests do not count: a prompt that joins must not change k.
            context: mean tokens of those requests, committed ones; None if nobody says.
            requests: their ids, for policies that keep something of each.
        """
        ...

    def observe(self, k_run: int, accepted: Sequence[int], lag: int = 0, requests: Sequence[int] | None = None) -> None:
        """Report a finished step.

        Args:
            k_run: the k that the step ran at, which may differ from the k of the latest `choose`.
            accepted: accepted draft tokens of each live request, 0..k_run; padding rows are left out.
            lag: steps launched since that one, before its result was known.
            requests: ids of the requests, in the order of `accepted`.
        """
        ...

    def to_dict(self) -> dict[str, Any]:
        """Settings and state, JSON-able, with the policy's name under `"kind"`."""
        ...

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The policy that `to_dict` described."""
        ...
