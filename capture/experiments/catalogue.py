"""Every experiment that has a script under `benchmarks/`, by name."""

import sys
from types import ModuleType

from stepgraph.capture.experiments import (
    acceptance,
    dynamic,
    early_exit,
    economy,
    growth,
    kernels,
    lossless,
    modes,
    peers,
    precision,
    regret,
)
from stepgraph.capture.experiments.results import Experiment, main


def _experiment(title: str, module: ModuleType) -> Experiment:
    return Experiment(module.__name__.rpartition(".")[2], title, module.measure, module.table, module.headlines)


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _experiment("Acceptance length", acceptance),
        _experiment("Acceptance length of the target's first layers", early_exit),
        _experiment("Greedy decoding beside other programs", peers),
        _experiment("Perplexity by dtype and weights", precision),
        _experiment("Growth of a step with context, batch and k", growth),
        _experiment("FULL, THREE_GRAPH, PIECEWISE, EAGER", modes),
        _experiment("Dynamic schedule against fixed k", dynamic),
        _experiment("Regret of policies for k", regret),
        _experiment("Graph economy", economy),
        _experiment("Losslessness", lossless),
        _experiment("Kernels", kernels),
    )
}


def script(name: str) -> int:
    """What `python benchmarks/NAME.py` does; returns its exit status."""
    return main(EXPERIMENTS[name], f"benchmarks/{name}.py", sys.argv[1:])
