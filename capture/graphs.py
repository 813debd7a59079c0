"""`StepGraphs`: one graph for each (batch bucket, k), and the one way to run a step."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from stepgraph.capture.backends import Captured, capture_key, warm_up_key
from stepgraph.capture.cuda import frozen_garbage, padding_only
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.phases import named_range
from stepgraph.capture.schedule import require_int
from stepgraph.capture.step import SpeculativeStep
from stepgraph.capture.trace import step_tensors


class CaptureError(RuntimeError):
    """A graph could not be captured, or a step has none, in strict mode."""


class EagerFallback(UserWarning):
    """A step that should have been a graph runs operator by operator; the message says why."""


class StepGraphs:
    """Captures and replays whole steps.

    On CUDA a graph is a `torch.cuda.CUDAGraph` (or several, see `Mode`), elsewhere an FX graph over the same static tensors;
    every mode computes the same step. A step without a graph runs eagerly, is counted as a miss and warned about once per
    reason.

    A graph holds its tensors, not their names: weights changed in place are seen by the next replay, weights that were
    replaced or moved only after the next `capture`, which then captures everything again.

    Args:
        step: the step; its state's `slots` are the only input that changes between replays.
        keys: the graphs to have.
        mode: a `Mode` or its name.
        strict: raise `CaptureError` instead of falling back to eager.

    Attributes:
        hits, misses: steps that found a graph, and that did not (EAGER mode counts neither).
        replays: graph replays by key.
        captures: what each key's capture took and holds.
        eager_reason: why the last replay ran operator by operator, None when it did not.
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
        self.captures: dict[GraphKey, Captured] = {}
        self._addresses: dict[str, int] = {}
        self.eager_reason: str | None = None
        self._failed: dict[GraphKey, str] = {}
        self._warned: set[str] = set()
        # One pool for all graphs: they never run at the same time, so they may share their scratch memory.
        self._pool = torch.cuda.graph_pool_handle() if step.state.slots.is_cuda else None

    def capture(self, progress: Callable[[Iterable[GraphKey]], Iterable[GraphKey]] = iter) -> None:
        """Capture every key that has no graph yet, largest first (later ones then fit into its memory); changes no state.
        When a tensor of the step has moved since the last capture, all graphs are dropped first.

        A key that is not captured here is captured at its first use. `progress` may wrap the keys in a bar.
        """
        if self.mode is Mode.EAGER:
            return
        if self.captures and self._addresses != self._current_addresses():
            self.destroy()
        pending = [key for key in self.keys if key not in self.captures and key not in self._failed]
        if pending:
            self._warm_up(pending)
            with frozen_garbage():
                for key in progress(sorted(pending, key=lambda key: key.batch * key.query_len, reverse=True)):
                    self._capture(key)

    @property
    def captured(self) -> frozenset[GraphKey]:
        return frozenset(self.captures)

    def __getitem__(self, key: GraphKey):
        """The captured graph of a key; KeyError when there is none."""
        return self.captures[key].graph

    def replay(self, batch: int, k: int) -> GraphKey | None:
        """Run one step for the first `batch` rows of `state.slots` with k drafts a row.

        Returns:
            The key whose graph ran, or None when the step ran eagerly.

        Raises:
            CaptureError: strict mode, and there is no graph.
        """
        require_int("batch", batch, 1, self.step.state.num_slots)
        require_int("k", k, 0, self.step.state.k_max)
        key = self.keys.lookup(batch, k)
        bucket = key.batch if key else batch
        self.step.state.pad_rows(batch)
        self.eager_reason = self._why_eager(batch, k, key)
        if self.eager_reason is not None:
            with torch.no_grad():
                self.step(bucket, k)
            return None
        self.hits += 1
        self.replays[key] += 1
        with torch.no_grad(), named_range(f"replay {key.batch}x{key.k}"):
            self.captures[key].graph.replay()
        return key

    def destroy(self) -> None:
        """Drop all graphs and the memory they hold; a later `capture` builds them again."""
        self.captures.clear()
        self._failed.clear()

    def report(self) -> dict:
        """Counts for a table or for JSON; `replays_by_key` has keys such as "4x3" for batch 4 at k = 3."""
        return {
            "graph_hits": self.hits,
            "graph_misses": self.misses,
            "captures": len(self.captures),
            "capture_s": sum(captured.seconds for captured in self.captures.values()),
            "replays_by_key": {f"{key.batch}x{key.k}": count for key, count in sorted(self.replays.items())},
        }

    def rows(self) -> list[dict]:
        """A row per captured key: what its capture took and holds, and how often it ran."""
        return [
            {
                "batch": key.batch,
                "k": key.k,
                "nodes": captured.nodes,
                "bytes": captured.nbytes,
                "capture_s": captured.seconds,
                "replays": self.replays[key],
            }
            for key, captured in sorted(self.captures.items())
        ]

    def _current_addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in step_tensors(self.step).items()}

    def _why_eager(self, batch: int, k: int, key: GraphKey | None) -> str | None:
        """Have a graph for the key; otherwise the reason, counted and said once. EAGER mode is a reason, and not a miss."""
        if self.mode is Mode.EAGER:
            return "mode is EAGER"
        if key is None:
            reason = f"no graph was asked for that holds batch {batch} at k={k}"
        else:
            if key not in self.captures and key not in self._failed:
                self._warm_up([key])
                self._capture(key)
            if key in self.captures:
                return None
            reason = self._failed[key]
        self.misses += 1
        if self.strict:
            raise CaptureError(reason)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"the step runs EAGER: {reason}", EagerFallback, stacklevel=3)
        return reason

    def _warm_up(self, keys: Iterable[GraphKey]) -> None:
        """All keys before the first capture: lazy initialisation may free or allocate what a captured graph knows."""
        if not self.captures:
            self._addresses = self._current_addresses()
        if self._pool is not None:
            with padding_only(self.step.state):
                for key in keys:
                    with self._attempt(key):
                        warm_up_key(self.step, key)

    def _capture(self, key: GraphKey) -> None:
        if key in self._failed:
            return
        start_s = time.perf_counter()
        with self._attempt(key):
            captured = capture_key(self.step, key, self.mode, self._pool)
            self.captures[key] = captured._replace(seconds=time.perf_counter() - start_s)

    @contextmanager
    def _attempt(self, key: GraphKey) -> Iterator[None]:
        """Whatever stops a capture (a host read, memory, a driver fault), the step itself still runs operator by operator."""
        try:
            yield
        except Exception as error:
            self._failed[key] = f"capture of batch {key.batch} at k={key.k} failed: {type(error).__name__}: {error}"
            if self.strict:
                raise CaptureError(self._failed[key]) from error
