"""Regret of the policies for k in worlds that are drawn: what each loses to the best fixed k in hindsight."""

from collections.abc import Iterator

import numpy as np

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.policies import BanditPolicy, FixedPolicy, GoodputPolicy, KPolicy, LadderPolicy
from stepgraph.capture.simulate.closed import fixed_runs, oracle_run, run_policy
from stepgraph.capture.simulate.worlds import leviathan_cost, parse_world

KS = tuple(range(9))
WORLDS = (
    "iid:0.3",
    "iid:0.6",
    "iid:0.8",
    "iid:0.9",
    "positions:0.8,0.6,0.5,0.4",
    "regimes:300:0.9/0.3",
    "regimes:3000:0.9/0.3",
)
DRAFT_COSTS = (0.05, 0.2)
BATCHES = (1, 8)


def policies(cost: CostTable) -> dict[str, KPolicy]:
    """The policies compared; the ladder stands on the published rungs of batch 1 everywhere."""
    return {
        "fixed:3": FixedPolicy(3),
        "ladder 1, 3, 5, 7": LadderPolicy({1: {"ks": [1, 3, 5, 7]}}),
        "goodput": GoodputPolicy(cost),
        "bandit": BanditPolicy(cost),
    }


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """A row for each world, draft cost, batch and policy."""
    steps = 2_000 if quick else 20_000
    for text in WORLDS[2:3] if quick else WORLDS:
        for draft_cost in DRAFT_COSTS[:1] if quick else DRAFT_COSTS:
            for batch in BATCHES[:1] if quick else BATCHES:
                cost = CostTable(leviathan_cost(draft_cost, KS))
                counts = parse_world(text).draw(np.random.default_rng(seed), steps, batch, KS[-1])
                best = min(fixed_runs(counts, cost, KS), key=lambda run: run.ms_per_token)
                oracle = oracle_run(counts, cost, KS)
                for name, policy in policies(cost).items():
                    run = run_policy(name, policy, counts, cost, KS)
                    yield {
                        "world": text, "draft_cost": draft_cost, "batch": batch, "steps": steps, "policy": name,
                        "regret": round(run.regret(best), 5), "best_fixed": best.name, "switches": run.switches,
                        "regret_to_oracle": round(run.regret(oracle), 5),
                    }  # fmt: skip


def table(rows: list[dict]) -> Table:
    names = list(dict.fromkeys(row["policy"] for row in rows))
    places = dict.fromkeys((row["world"], row["draft_cost"], row["batch"], row["best_fixed"]) for row in rows)
    by_place = {(row["world"], row["draft_cost"], row["batch"], row["policy"]): row for row in rows}
    lines = [
        [
            world,
            f"{cost:g}",
            str(batch),
            best,
            *(f"{100 * by_place[world, cost, batch, name]['regret']:.1f} %" for name in names),
        ]
        for world, cost, batch, best in places
    ]
    note = "Share of the best fixed k's tokens per time that a policy misses; negative where a changing k beats all fixed ones."
    return Table(["world", "draft cost", "batch", "best fixed k", *names], lines, note)


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """The range of each policy's regret over stationary worlds, and over those that change."""
    told = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        for kind, changing in (("stationary", False), ("changing", True)):
            found = [
                100 * row["regret"] for row in rows if row["policy"] == name and row["world"].startswith("regimes") == changing
            ]
            if found:
                told.append(
                    (f"regret against the best fixed k, {kind} worlds: {name}", f"{min(found):.1f} to {max(found):.1f} %")
                )
    return told
