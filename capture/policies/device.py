"""Policies that choose the next step's k inside the step, as tensor operations without a host read.

They answer with the index of a body among the graphs of one bucket (`stepgraph.capture.switch`), one for each k of `ks`. Their
state is in buffers, so it is a part of the traced step; rows that are not live change nothing of it.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from stepgraph.capture.keys import MAX_BATCH
from stepgraph.capture.policies.adaptive import checked_number
from stepgraph.capture.schedule import Schedule, require_int, show
from stepgraph.capture.state import DecodeState
from stepgraph.kernels.advance import RUNNING

# Columns of a row of `DecodeState.results` (see `stepgraph.kernels.advance`); a row that is not live holds −1.
SEQ_LEN, FINISHED, DRAFTED, ACCEPTED = range(4)


class DevicePolicy(nn.Module):
    """Base of the policies that run on the device.

    Args:
        ks: every k it may choose, ascending; body i runs at `ks[i]`.
        first_k: k of the first step.
        device: where the state lives.

    Attributes:
        next_body: `[1]` int32, index into `ks`; the next step's.
        ran_k: `[1]` int32, k of the last step that had a live row. The host does not know it before it reads it here.
    """

    def __init__(self, ks: Sequence[int], first_k: int, device: torch.device | str = "cpu"):
        super().__init__()
        self.ks = _ascending("ks", [require_int("a k in ks", k, 0) for k in ks])
        if first_k not in self.ks:
            raise ValueError(f"first_k is {show(first_k)}; it must be one of ks, {', '.join(map(str, self.ks))}.")
        first = torch.tensor([self.ks.index(first_k)], dtype=torch.int32)
        self.register_buffer("next_body", first.to(device), persistent=False)
        self.register_buffer("ran_k", torch.full_like(self.next_body, first_k), persistent=False)

    def update(self, state: DecodeState, batch: int, k: int) -> None:
        """Learn from the step that has just been committed, and choose the next one's body. Traced.

        Args:
            state: after the step; its first `batch` rows of `results` are the step's.
            batch: rows of the step, padding included.
            k: of the step.
        """
        results = state.results[:batch]
        live = results[:, SEQ_LEN] >= 0
        # Beyond the last body a SWITCH node would run none, and the step would be skipped in silence.
        body = self.choose(results, live, k).clamp(0, len(self.ks) - 1).to(torch.int32)
        torch.where(live.any(), body, self.next_body, out=self.next_body)
        torch.where(live.any(), torch.full_like(self.ran_k, k), self.ran_k, out=self.ran_k)

    def choose(self, results: Tensor, live: Tensor, k: int) -> Tensor:
        """Index into `ks`, a scalar, from `results [B, 5 + k_max + 1]` int64 and `live [B]` bool of a step at `k`."""
        raise NotImplementedError


class DeviceTablePolicy(DevicePolicy):
    """k by the number of requests that are still running after the step: the schedule as a table on the device.

    Requests that the host adds between two steps count one step later.

    Args:
        schedule: batch → k.
        max_batch: most requests in a step.
        device: where the state lives.

    Attributes:
        table: `[max_batch + 1]` int64, batch → index into `ks`.
    """

    def __init__(self, schedule: Schedule, max_batch: int, device: torch.device | str = "cpu"):
        require_int("max_batch", max_batch, 1, MAX_BATCH)
        ks = sorted(schedule.ks(max_batch))
        super().__init__(ks, schedule.k_for(max_batch), device)
        bodies = [ks.index(schedule.k_for(max(n, 1))) for n in range(max_batch + 1)]
        self.register_buffer("table", torch.tensor(bodies).to(device), persistent=False)

    def choose(self, results: Tensor, live: Tensor, k: int) -> Tensor:
        running = (live & (results[:, FINISHED] == RUNNING)).sum()
        return self.table.index_select(0, running[None])


class DeviceAcceptancePolicy(DevicePolicy):
    """k by an exponential moving average of the accepted fraction of drafts.

        a ← decay · a + (1 − decay) · accepted / drafted        after each step that drafted, over its live rows
        next k = ks[number of thresholds ≤ a]

    k = 0 drafts nothing, so `a` would stay where it is for ever: after `probe_every` steps at k = 0 in a row, one step runs at
    the smallest other k.

    Args:
        ks: k of each level, ascending.
        thresholds: accepted fraction from which level i + 1 is better than level i, ascending, in 0..1; one fewer than `ks`.
        decay: in 0..1, per step.
        start: the average before the first step.
        probe_every: steps at k = 0 between two probes.
        device: where the state lives.

    Attributes:
        average: `[]` float64, so that a host that follows the formula gets the same bits.
        resting: `[]` int64, steps at k = 0 in a row.
    """

    def __init__(
        self,
        ks: Sequence[int],
        thresholds: Sequence[float],
        *,
        decay: float = 0.9,
        start: float = 1.0,
        probe_every: int = 16,
        device: torch.device | str = "cpu",
    ):
        for name, value in (("decay", decay), ("start", start), *(("a threshold", each) for each in thresholds)):
            checked_number(name, value, 0, 1)
        _ascending("ks", ks)
        if len(thresholds) != len(ks) - 1:
            raise ValueError(f"thresholds has {len(thresholds)} values; {len(ks)} values of k need {len(ks) - 1}.")
        _ascending("thresholds", thresholds)
        super().__init__(ks, ks[sum(threshold <= start for threshold in thresholds)], device)
        self.decay, self.probe_every = float(decay), require_int("probe_every", probe_every, 1)
        edges = torch.tensor(list(thresholds), dtype=torch.float64)
        self.register_buffer("thresholds", edges.to(device), persistent=False)
        self.register_buffer("average", torch.tensor(float(start), dtype=torch.float64).to(device), persistent=False)
        self.register_buffer("resting", torch.tensor(0).to(device), persistent=False)

    def choose(self, results: Tensor, live: Tensor, k: int) -> Tensor:
        drafted = torch.where(live, results[:, DRAFTED], 0).sum()
        accepted = torch.where(live, results[:, ACCEPTED], 0).sum()
        fraction = accepted.to(torch.float64) / drafted.clamp(min=1).to(torch.float64)
        moved = self.decay * self.average + (1 - self.decay) * fraction
        torch.where(drafted > 0, moved, self.average, out=self.average)
        level = (self.thresholds <= self.average).sum()
        if self.ks[0] > 0:
            return level
        rested = self.resting + 1 if k == 0 else torch.zeros_like(self.resting)
        torch.where(live.any(), rested, self.resting, out=self.resting)
        return torch.where(self.resting >= self.probe_every, level.clamp(min=1), level)


def _ascending(name: str, values: Sequence) -> tuple:
    if not values and name == "ks":
        raise ValueError("ks is empty; give at least one k.")
    for lower, upper in pairwise(values):
        if lower >= upper:
            raise ValueError(f"{name} must ascend strictly, but {upper} follows {lower}.")
    return tuple(values)
