"""`StepGraphs`: one graph for each (batch bucket, k), and the one way to run a step."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Protocol

import torch

from stepgraph.capture.cuda import capture_cuda_graph
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.schedule import require_int
from stepgraph.capture.step import SpeculativeStep
from stepgraph.capture.trace import trace_step


class Mode(StrEnum):
    """How steps run: the whole step in one graph, or operator by operator."""

    FULL = "FULL"
    EAGER = "EAGER"


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class CaptureError(RuntimeError):
    """A graph could not be captured, or a step has none, in strict mode."""


class EagerFallback(UserWarning):
    """A step that should have been a graph runs operator by operator; the message says why."""


class StepGraphs:
    """Captures and replays whole steps.

    On CUDA a graph is a `torch.cuda.CUDAGraph`, elsewhere an FX graph over the same static tensors; every mode computes the
    same step. A step without a graph runs eagerly, is counted as a miss and warned about once per reason.

    A graph holds its tensors, not their names: weights changed in place are seen by the next replay, weights that were
    replaced or moved are not until `destroy` and a new capture.

    Args:
        step: the step; its state's `slots` are the only input that changes between replays.
        keys: the graphs to have.
        mode: FULL or EAGER.
        strict: raise `CaptureError` instead of falling back to eager.

    Attributes:
        hits, misses: steps that found a graph, and that did not (EAGER mode counts neither).
        replays: graph replays by key.
        capture_s: seconds each key's capture took, by key.
    """

    def __init__(self, step: SpeculativeStep, keys: KeySet, *, mode: Mode | str = Mode.FULL, strict: bool = False):
        try:
            self.mode = Mode(mode)
        except ValueError:
            raise ValueError(f"mode is {mode!r}; allowed are {', '.join(Mode)}") from None
        largest = max((key.batch for key in keys), default=0)
        if max(keys.ks, default=0) > step.state.k_max:
            raise ValueError(f"a graph for k={max(keys.ks)} was asked for; the state was made for k up to {step.state.k_max}")
        if largest > step.state.num_slots:
            raise ValueError(f"a graph for batch {largest} was asked for; the state has {step.state.num_slots} slots")
        self.step, self.keys, self.strict = step, keys, strict
        self.hits, self.misses = 0, 0
        self.replays: Counter[GraphKey] = Counter()
        self.capture_s: dict[GraphKey, float] = {}
        self._graphs: dict[GraphKey, Graph] = {}
        self._failed: dict[GraphKey, str] = {}
        self._warned: set[str] = set()
        # One pool for all graphs: they never run at the same time, so they may share their scratch memory.
        self._pool = torch.cuda.graph_pool_handle() if step.state.slots.is_cuda else None

    def capture(self, progress: Callable[[Iterable[GraphKey]], Iterable[GraphKey]] = iter) -> None:
        """Capture every key that has no graph yet, largest first (later ones then fit into its memory); changes no state.

        A key that is not captured here is captured at its first use. `progress` may wrap the keys in a bar.
        """
        if self.mode is Mode.EAGER:
            return
        pending = [key for key in self.keys if key not in self._graphs and key not in self._failed]
        if pending:
            for key in progress(sorted(pending, key=lambda key: key.batch * key.query_len, reverse=True)):
                self._capture(key)

    @property
    def captured(self) -> frozenset[GraphKey]:
        return frozenset(self._graphs)

    def __getitem__(self, key: GraphKey) -> Graph:
        """The captured graph of a key; KeyError when there is none."""
        return self._graphs[key]

    def replay(self, batch: int, k: int) -> GraphKey | None:
        """Run one step for the first `batch` rows of `state.slots` with k drafts a row.

        Returns:
            The key whose graph ran, or None when the step ran eagerly.

        Raises:
            CaptureError: strict mode, and there is no graph.
        """
        slots = self.step.state.slots
        require_int("batch", batch, 1, len(slots))
        require_int("k", k, 0, self.step.state.k_max)
        key = self.keys.lookup(batch, k)
        bucket = key.batch if key else batch
        slots[batch:bucket] = -1
        if self.mode is Mode.EAGER:
            self._eager(bucket, k)
            return None
        reason = f"no graph was asked for that holds batch {batch} at k={k}" if key is None else self._ensure(key)
        if reason is not None:
            self._miss(reason)
            self._eager(bucket, k)
            return None
        self.hits += 1
        self.replays[key] += 1
        with torch.no_grad():
            self._graphs[key].replay()
        return key

    def destroy(self) -> None:
        """Drop all graphs and the memory they hold; a later `capture` builds them again."""
        self._graphs.clear()
        self._failed.clear()

    def report(self) -> dict:
        """Counts for a table or for JSON; `replays_by_key` has keys such as "4x3" for batch 4 at k = 3."""
        return {
            "graph_hits": self.hits,
            "graph_misses": self.misses,
            "captures": len(self.capture_s),
            "capture_s": sum(self.capture_s.values()),
            "replays_by_key": {f"{key.batch}x{key.k}": count for key, count in sorted(self.replays.items())},
        }

    def _eager(self, batch: int, k: int) -> None:
        with torch.no_grad():
            self.step(batch, k)

    def _ensure(self, key: GraphKey) -> str | None:
        """Have a graph for `key`; returns the reason when there is none."""
        if key not in self._graphs and key not in self._failed:
            self._capture(key)
        return self._failed.get(key)

    def _capture(self, key: GraphKey) -> None:
        start_s = time.perf_counter()
        try:
            if self.step.state.slots.is_cuda:
                self._graphs[key] = capture_cuda_graph(self.step, key, self._pool)
            else:
                self._graphs[key] = trace_step(self.step, key.batch, key.k)
        # Whatever stops a capture (a host read, memory, a driver fault), the step itself still runs operator by operator.
        except Exception as error:
            self._failed[key] = f"capture of batch {key.batch} at k={key.k} failed: {type(error).__name__}: {error}"
            if self.strict:
                raise CaptureError(self._failed[key]) from error
        else:
            self.capture_s[key] = time.perf_counter() - start_s

    def _miss(self, reason: str) -> None:
        self.misses += 1
        if self.strict:
            raise CaptureError(reason)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"the step runs EAGER: {reason}", EagerFallback, stacklevel=3)
