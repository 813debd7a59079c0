"""k as the arm of a bandit: no model of acceptance, only what each k has earned."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies.adaptive import AnyBatch, checked_number, table_and_ks
from stepgraph.capture.policies.saved import saved_counts, saved_key, saved_list, saved_object
from stepgraph.capture.schedule import require_int


class BanditPolicy(AnyBatch):
    """UCB1 (Auer, Cesa-Bianchi, Fischer 2002) over k, for each octave of batch sizes.

        reward of a step = emitted tokens / T(batch, k), as a fraction of the most that any k could emit there
        play argmax over k of  mean reward of k + exploration · √(2 ln n / n_k)

    n_k counts the plays of k and n all plays in the octave; each k is played once before any twice, so k = 0 is tried like
    the others and is left when the others earn more. Hysteresis: an arm is kept for `hold_steps` steps, which make one play.
    Regret grows as the logarithm of the steps in a stationary world.

    Args:
        cost: step times, or the path of a profile.
        ks: the arms; default all that the table has.
        exploration: 1 is UCB1's own; less explores less, which pays where rewards scatter little.
        hold_steps: steps of one play.
    """

    kind = "bandit"

    def __init__(
        self,
        cost: CostTable | str | os.PathLike[str],
        ks: Iterable[int] | None = None,
        *,
        exploration: float = 0.1,
        hold_steps: int = 8,
    ):
        self.cost, self._ks = table_and_ks(cost, ks)
        self.exploration = checked_number("exploration", exploration, 0, 100)
        self.hold_steps = require_int("hold_steps", hold_steps, 1)
        self._plays: dict[int, list[list[float]]] = {}  # octave -> [steps, summed reward] of each k
        self._arm: dict[int, list[int]] = {}  # octave -> [index of the arm in play, steps left]

    def choose(self, batch: int, context: int | None = None, requests: Sequence[int] | None = None) -> int:
        octave = _octave(batch)
        arm = self._arm.setdefault(octave, [0, 0])
        if arm[1] == 0:
            arm[0], arm[1] = self._best(octave), self.hold_steps
        arm[1] -= 1
        return self._ks[arm[0]]

    def _best(self, octave: int) -> int:
        plays = self._plays.setdefault(octave, [[0.0, 0.0] for _ in self._ks])
        for index, (steps, _) in enumerate(plays):
            if steps == 0:
                # With results that lag, the same arm may be in play once more; it is not wrong, only early.
                return index
        total = math.log(sum(steps for steps, _ in plays) / self.hold_steps + 1)

        def bound(index: int) -> float:
            steps, reward = plays[index]
            return reward / steps + self.exploration * math.sqrt(2 * total * self.hold_steps / steps)

        return max(range(len(plays)), key=bound)

    def observe(self, k_run: int, accepted: Sequence[int], lag: int = 0, requests: Sequence[int] | None = None) -> None:
        batch = len(accepted)
        if k_run not in self._ks or not batch:
            return
        most = max(batch * (k + 1) / self.cost.step_ms(batch, k) for k in self._ks)
        earned = (sum(accepted) + batch) / self.cost.step_ms(batch, k_run)
        plays = self._plays.setdefault(_octave(batch), [[0.0, 0.0] for _ in self._ks])
        play = plays[self._ks.index(k_run)]
        play[0] += 1
        play[1] += earned / most

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "cost": self.cost.rows, "ks": list(self._ks), "exploration": self.exploration,
            "hold_steps": self.hold_steps,
            "state": {
                "plays": {str(octave): plays for octave, plays in self._plays.items()},
                "arm": {str(octave): arm for octave, arm in self._arm.items()},
            },
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        options = {"exploration": data["exploration"], "hold_steps": data["hold_steps"]}
        policy = cls(CostTable(data["cost"]), data["ks"], **options)
        state, arms = saved_object("state", data["state"]), len(policy._ks)
        for octave, plays in saved_object("plays", state["plays"]).items():
            each = [saved_counts("a play", play, 2) for play in saved_list("plays", plays, arms)]
            policy._plays[saved_key("plays", octave)] = each
        for octave, arm in saved_object("arm", state["arm"]).items():
            index, left = saved_list("arm", arm, 2)
            require_int("the index of an arm in the saved state", index, 0, arms - 1)
            require_int("the steps left of an arm in the saved state", left, 0, policy.hold_steps)
            policy._arm[saved_key("arm", octave)] = [index, left]
        return policy

    def __repr__(self) -> str:
        return f"BanditPolicy(ks={list(self._ks)})"


def _octave(batch: int) -> int:
    return (require_int("batch", batch, 1) - 1).bit_length()
