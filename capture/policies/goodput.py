"""k that promises the most tokens per millisecond, from measured step times and measured acceptance."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies.adaptive import (
    AnyBatch,
    PositionRates,
    RequestRates,
    checked_number,
    expected_tokens,
    table_and_ks,
)
from stepgraph.capture.policies.saved import saved_key, saved_list, saved_object, saved_rates
from stepgraph.capture.schedule import require_int, show

DEFAULT_PRIOR = 0.7
# Tokens to which a context is rounded: step times move slowly with it, and are looked up for every k of every step.
CONTEXT_GRAIN = 64
# Requests' worth of evidence that the average of all weighs in a request's own.
WEIGHT = 4.0


class GoodputPolicy(AnyBatch):
    """argmax over k of Σ_requests E_r(k) / T(batch, k, context).

        E_r(k) = 1 + Σ_{j ≤ k} Π_{i ≤ j} a_{r,i}

    a_{r,i} is request r's acceptance at position i, a moving average that starts from the average of all requests
    (`PositionRates`); with `iid` there is one rate for all positions and E(k) = (1 − α^(k+1)) / (1 − α) (Leviathan et al. 2023,
    equation 1). Goodput as the objective follows SmartSpec (Liu et al. 2024).

    Hysteresis: k changes only if the other k promises `margin` more, and at the earliest `hold_steps` steps after the last
    change. Probe: every `probe_interval` steps one step runs at the next larger k, so positions that are not drafted any more
    are looked at again and k = 0 is left by itself. A probe is no change of k.

    Args:
        cost: step times, or the path of a profile.
        ks: k to choose from; default all that the table has.
        prior: acceptance before there is data: a rate, or one for each position.
        iid: one rate for all positions.
        learn: False keeps the prior for ever, and never probes.
        memory: γ of the averages of all requests.
        request_memory: γ of a request's own.
        margin: gain that a change of k must promise, as a fraction.
        hold_steps: steps between two changes.
        probe_interval: steps; 0 never probes.
    """

    kind = "goodput"

    def __init__(
        self,
        cost: CostTable | str | os.PathLike[str],
        ks: Iterable[int] | None = None,
        *,
        prior: float | Sequence[float] = DEFAULT_PRIOR,
        iid: bool = False,
        learn: bool = True,
        memory: float = 0.98,
        request_memory: float = 0.95,
        margin: float = 0.01,
        hold_steps: int = 8,
        probe_interval: int = 200,
    ):
        self.cost, self._ks = table_and_ks(cost, ks)
        self.prior = _checked_prior(prior)
        self.iid, self.learn = _checked_switch("iid", iid), _checked_switch("learn", learn)
        self.memory = checked_number("memory", memory, 0, 1)
        self.request_memory = checked_number("request_memory", request_memory, 0, 1)
        self.margin = checked_number("margin", margin, 0, 10)
        self.hold_steps = require_int("hold_steps", hold_steps, 0)
        self.probe_interval = require_int("probe_interval", probe_interval, 0)
        given = [self.prior] if isinstance(self.prior, float) else self.prior
        by_position = [*given, *given[-1:] * self._ks[-1]][: self._ks[-1]]
        self._of_prior = expected_tokens(np.array(by_position)).tolist()
        self._all = PositionRates(by_position, self.memory, WEIGHT, self.iid)
        self._own = RequestRates(self._ks[-1], self.request_memory, WEIGHT, self.iid)
        self._at: int | None = None  # index of the chosen k
        self._age = 0
        self._unseen = 0  # steps since a k above the chosen one last ran

    def choose(self, batch: int, context: int | None = None, requests: Sequence[int] | None = None) -> int:
        require_int("batch", batch, 1)
        expected = self._expected(requests)
        context = None if context is None else context - context % CONTEXT_GRAIN
        promised = [expected[k] / self.cost.step_ms(batch, k, context) for k in self._ks]
        best = promised.index(max(promised))  # the smallest of equals
        self._age += 1
        settled = self._at is not None and self._age <= self.hold_steps
        if self._at is None or (not settled and promised[best] > (1 + self.margin) * promised[self._at]):
            self._at, self._age = best, 0
        larger = self._at + 1
        self._unseen += 1
        if not self.learn or not self.probe_interval or larger == len(self._ks) or self._unseen <= self.probe_interval:
            return self._ks[self._at]
        self._unseen = 0
        return self._ks[larger]

    def observe(self, k_run: int, accepted: Sequence[int], lag: int = 0, requests: Sequence[int] | None = None) -> None:
        if not self.learn or k_run == 0 or not accepted:
            return
        k = min(k_run, self._ks[-1])
        counts = [min(count, k) for count in accepted]
        self._all.observe(k, counts)
        if requests is not None:
            self._own.observe(k, requests, counts)

    def _expected(self, requests: Sequence[int] | None) -> list[float]:
        """`[largest k + 1]`: expected tokens of a step by k, up to a factor."""
        if not self.learn or not self._ks[-1]:
            return self._of_prior
        common = self._all.rates()
        if requests is None:
            return expected_tokens(np.array(common)).tolist()
        return expected_tokens(self._own.rates(requests, common)).sum(0).tolist()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "cost": self.cost.rows, "ks": list(self._ks), "prior": self.prior, "iid": self.iid,
            "learn": self.learn, "memory": self.memory, "request_memory": self.request_memory, "margin": self.margin,
            "hold_steps": self.hold_steps, "probe_interval": self.probe_interval,
            "state": {
                "all": [self._all.accepted, self._all.reached], "own": self._own.counts.tolist(),
                "row": {str(request): row for request, row in self._own.row.items()},
                "at": self._at, "age": self._age, "unseen": self._unseen,
            },
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        names = ("prior", "iid", "learn", "memory", "request_memory", "margin", "hold_steps", "probe_interval")
        policy = cls(CostTable(data["cost"]), data["ks"], **{name: data[name] for name in names})
        state, positions = saved_object("state", data["state"]), policy._ks[-1]
        policy._all.accepted, policy._all.reached = saved_rates("all", *saved_list("all", state["all"], 2), positions)
        row = {saved_key("row", request): row for request, row in saved_object("row", state["row"]).items()}
        if row:
            accepted, reached = saved_list("own", state["own"], 2)
            reached = saved_list("own", reached, len(accepted) if isinstance(accepted, list) else 0)
            own = [saved_rates("own", *each, positions) for each in zip(accepted, reached, strict=True)]
            policy._own.counts = np.array(own, dtype=float).reshape(-1, 2, positions).swapaxes(0, 1).copy()
            for each in row.values():
                require_int("a row in the saved state", each, 0, len(own) - 1)
            if len(set(row.values())) != len(row):
                raise ValueError(f"row in the saved state is {show(row)}; no two requests may have the same.")
        policy._own.row = row
        if state["at"] is not None:
            require_int("at in the saved state", state["at"], 0, len(policy._ks) - 1)
        policy._at = state["at"]
        policy._age, policy._unseen = (require_int(f"{name} in the saved state", state[name], 0) for name in ("age", "unseen"))
        return policy

    def __repr__(self) -> str:
        return f"GoodputPolicy(ks={list(self._ks)})"


def _checked_switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):  # "false" and "no" are true to Python
        raise ValueError(f"{name} is {show(value)}; it must be true or false.")
    return value


def _checked_prior(prior: Any) -> float | list[float]:
    if isinstance(prior, Sequence) and not isinstance(prior, str) and prior:
        return [checked_number("a rate in prior", rate, 0, 1) for rate in prior]
    if isinstance(prior, bool) or not isinstance(prior, int | float):
        raise ValueError(f"prior is {show(prior)}; it must be a rate from 0 to 1 or a list of them.")
    return checked_number("prior", prior, 0, 1)
