"""Graph economy: how many graphs a schedule needs, and what they pad, for several choices of bucket sizes. Exact, no times."""

from collections.abc import Iterator

from stepgraph.capture.experiments.results import Table
from stepgraph.capture.plan.plan import rung_sets
from stepgraph.capture.policies import make_policy

MAX_BATCH = 256
SCHEDULES = {
    "published": [[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 512, 0]],
    "three steps": [[1, 8, 4], [9, 64, 2], [65, 256, 0]],
    "fixed k = 3": [[1, 256, 3]],
}
HOLDS = (0, 8)


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """A row for each schedule, hysteresis and choice of buckets."""
    for name, schedule in SCHEDULES.items():
        for hold_steps in HOLDS[:1] if quick else HOLDS:
            policy = make_policy(schedule=schedule, hold_steps=hold_steps)
            for buckets, (graphs, mean, worst) in rung_sets(policy, MAX_BATCH).items():
                yield {
                    "schedule": name, "ranges": schedule, "hold_steps": hold_steps, "max_batch": MAX_BATCH, "buckets": buckets,
                    "graphs": graphs, "padding_mean": round(mean, 6), "padding_worst": round(worst, 6),
                }  # fmt: skip


def table(rows: list[dict]) -> Table:
    header = ["schedule", "hysteresis, steps", "buckets", "graphs", "mean padding", "worst padding"]
    lines = [
        [
            row["schedule"], str(row["hold_steps"]), row["buckets"], str(row["graphs"]), f"{100 * row['padding_mean']:.1f} %",
            f"{100 * row['padding_worst']:.1f} %",
        ]
        for row in rows
    ]  # fmt: skip
    return Table(header, lines, f"Padding rows over live rows, each batch size from 1 to {MAX_BATCH} once.")


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Graphs and padding of the published schedule."""
    return [
        (f"graphs and mean padding, published schedule, {row['buckets']} buckets",
         f"{row['graphs']}, {100 * row['padding_mean']:.1f} %")
        for row in rows
        if (row["schedule"], row["hold_steps"]) == ("published", 0)
    ]  # fmt: skip
