"""Device-chosen k: the host launches a bucket, the device decides at which k it runs.

    host      replay(batch) … replay(batch) … replay(batch)          never waits to learn what k should be
    device    body next_body of the bucket: draft … advance, and at its end the policy writes next_body

On CUDA the graphs of one bucket, one for each k, are the bodies of one SWITCH conditional node
(`stepgraph.capture.switch_node`). Elsewhere the index is read from the tensor and that FX graph is replayed, the same step.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import MAX_BATCH, GraphKey, KeySet
from stepgraph.capture.phases import phase
from stepgraph.capture.policies.device import DevicePolicy
from stepgraph.capture.schedule import require_int
from stepgraph.capture.step import SpeculativeStep
from stepgraph.capture.switch_node import SwitchNode, require_switch


class SwitchStep(SpeculativeStep):
    """`step`, and at its end the choice of the next one's k; target, cache, state and drafter are shared with `step`."""

    def __init__(self, step: SpeculativeStep, policy: DevicePolicy):
        super().__init__(step.target, step.kv, step.state, step.drafter)
        if policy.next_body.device != step.state.slots.device:
            raise ValueError(f"the policy lives on {policy.next_body.device}, the state on {step.state.slots.device}")
        self.policy = policy

    def forward(self, batch: int, k: int) -> None:
        super().forward(batch, k)
        with phase("advance"):
            self.policy.update(self.state, batch, k)


class SwitchGraphs:
    """One replayable graph for each bucket, whatever k the device chooses.

    The host does not know k when it launches: block tables have to be grown for the largest, max(policy.ks) + 1 tokens a step,
    and what a step ran at is read from `policy.ran_k` or from the results.

    Args:
        step: the step and its policy.
        buckets: batch sizes to have graphs for, ascending, in requests.

    Attributes:
        graphs: the bodies. They are captured strictly: a SWITCH node without one would skip the step in silence.
        replays: by bucket.

    Raises:
        SwitchUnsupported: the state is on a CUDA device that cannot do this (CUDA below 12.8, no `cuda-bindings`).
    """

    def __init__(self, step: SwitchStep, buckets: Sequence[int]):
        buckets = [require_int("a bucket", bucket, 1, MAX_BATCH) for bucket in buckets]
        if not buckets or any(lower >= upper for lower, upper in pairwise(buckets)):
            raise ValueError(f"buckets is {buckets}; it must be a strictly ascending list of batch sizes.")
        self.on_cuda = step.state.slots.is_cuda
        if self.on_cuda:
            require_switch()
        self.step, self.policy, self.buckets = step, step.policy, tuple(buckets)
        keys = KeySet(GraphKey(bucket, k) for bucket in buckets for k in step.policy.ks)
        self.graphs = StepGraphs(step, keys, strict=True)
        self.replays: Counter[int] = Counter()
        self._nodes: dict[int, SwitchNode] = {}

    def capture(self, progress: Callable[[Iterable[GraphKey]], Iterable[GraphKey]] = iter) -> None:
        """Capture every body, and on CUDA join those of each bucket; changes no state, the policy's included.

        Like `StepGraphs.capture`, it does nothing for what has been captured already.
        """
        self.graphs.capture(progress)
        for bucket in self.buckets if self.on_cuda else ():
            bodies = [self.graphs[GraphKey(bucket, k)] for k in self.policy.ks]
            node = self._nodes.get(bucket)
            if node is not None and list(node.bodies) != bodies:  # captured again since
                self._nodes.pop(bucket).destroy()
            if bucket not in self._nodes:
                self._nodes[bucket] = SwitchNode(self.policy.next_body, bodies)

    def replay(self, batch: int) -> int:
        """Run one step for the first `batch` rows of `state.slots`, at the k that the step before it chose.

        Returns:
            The bucket it ran in.
        """
        require_int("batch", batch, 1, self.buckets[-1])
        bucket = self.buckets[bisect_left(self.buckets, batch)]
        if not self.on_cuda:
            self.graphs.replay(batch, self.policy.ks[int(self.policy.next_body)])
        else:
            if bucket not in self._nodes:
                self.capture()
            self.step.state.pad_rows(batch)
            self._nodes[bucket].launch()
        self.replays[bucket] += 1
        return bucket

    def destroy(self) -> None:
        """Drop all graphs and the memory they hold; a later `capture` builds them again."""
        while self._nodes:
            self._nodes.popitem()[1].destroy()
        self.graphs.destroy()
