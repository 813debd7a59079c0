"""The dynamic schedule against every fixed k: T(batch, k) is measured, throughput follows from it and the stated acceptance."""

from collections.abc import Iterator

import torch

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.experiments.modes import ACCEPTANCE, LABEL, random_options, random_target
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.plan.plan import expected_tokens
from stepgraph.capture.profile.measure import best_schedule, measure_costs


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """T(batch, k) of random weights, the schedule that follows, and the throughput of it and of each fixed k: an 8B-class
    model up to batch 256 on a GPU, the embedded one's shape up to 32 on a CPU.
    """
    if quick:
        model, batches, ks, context, repeats = "tiny-llama", [1, 2], [0, 2], 32, 2
    elif torch.cuda.is_available():
        model, batches, ks = "llama-3.1-8b", [1, 2, 4, 8, 16, 32, 64, 128, 192, 256], [0, 1, 2, 3, 4, 5]
        context, repeats = 1024, 9
    else:
        model, batches, ks, context, repeats = "smollm2-135m", [1, 2, 4, 8, 16, 32], [0, 1, 3, 5], 128, 5
    options = random_options(model, "eagle3:random", max(ks), max(batches), context)
    rows = measure_costs(options, random_target(model), batches, ks, [context], repeats)
    for row in rows:
        yield {"what": "step", "model": model, **row}
    cost = CostTable(rows)
    schedule = best_schedule(cost, ACCEPTANCE, max(batches), context)
    yield {"what": "schedule", "model": model, "schedule": schedule, "acceptance": ACCEPTANCE, "label": LABEL}
    for batch in batches:
        chosen = next(k for first, last, k in schedule if first <= batch <= last)
        for name, k in (*((f"fixed:{k}", k) for k in ks), ("schedule", chosen)):
            step_ms, tokens = cost.step_ms(batch, k, context), expected_tokens(ACCEPTANCE, k)
            yield {
                "what": "throughput", "model": model, "label": LABEL, "batch": batch, "policy": name, "k": k,
                "tokens_per_s": batch * tokens / step_ms * 1e3, "tpot_ms": step_ms / tokens,
            }  # fmt: skip


def table(rows: list[dict]) -> Table:
    """Tokens a second by batch, a column for each fixed k and one for the schedule with its k and TPOT."""
    of_batch: dict[int, dict[str, dict]] = {}
    for row in rows:
        if row["what"] == "throughput":
            of_batch.setdefault(row["batch"], {})[row["policy"]] = row
    policies = list(dict.fromkeys(name for found in of_batch.values() for name in found if name != "schedule"))
    lines = []
    for batch, found in of_batch.items():
        fixed = [f"{found[name]['tokens_per_s']:.1f}" if name in found else "" for name in policies]
        if chosen := found.get("schedule"):
            lines.append([str(batch), *fixed, f"{chosen['tokens_per_s']:.1f}", str(chosen["k"]), f"{chosen['tpot_ms']:.2f}"])
    header = ["batch", *(name.replace("fixed:", "k = ") for name in policies), "schedule", "its k", "its TPOT, ms"]
    told = [row for row in rows if row["what"] == "schedule"]
    rates = ", ".join(map(str, told[0]["acceptance"])) if told else ""
    note = "Tokens a second: the tokens of a step at the stated acceptance, over its measured median time. "
    return Table(header, lines, note + "".join(f"{row['model']}, {row['label']} {rates}." for row in told))


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Throughput of the schedule over that of each fixed k, over all batches."""
    rates = {(row["policy"], row["batch"]): row["tokens_per_s"] for row in rows if row["what"] == "throughput"}
    told = []
    for policy in dict.fromkeys(name for name, _ in rates if name != "schedule"):
        gains = [rates["schedule", b] / rates[policy, b] for name, b in rates if name == policy and ("schedule", b) in rates]
        model = next(row["model"] for row in rows if row["what"] == "throughput")
        figure = f"throughput of the schedule over {policy.replace(':', ' k = ')}, {model}, over batches"
        told.append((figure, f"{min(gains):.2f} to {max(gains):.2f}"))
    return told
