"""A picture of one step's roofline time by phase, for every planned key."""

from importlib.util import find_spec

from stepgraph.capture.console import require_writable
from stepgraph.capture.phases import PHASES
from stepgraph.capture.plan.plan import Plan


def require_plot(path: str) -> None:
    """Find out before the work whether `plot_plan` can write to `path`."""
    if not path.endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"--plot is {path!r}; its ending must be .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install the extra: pip install 'stepgraph[bench]'")
    require_writable("--plot", path)


def plot_plan(plan: Plan, path: str) -> None:
    """Write a timeline of each key's step, phase after phase, as PNG, SVG or PDF by the path's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.28 * len(plan.keys)), layout="constrained")
    labels = [f"B={key.batch} k={key.k}" for key in plan.keys]
    starts = [0.0] * len(plan.keys)
    for name in PHASES:
        widths = [key.phases[name] for key in plan.keys]
        axes.barh(labels, widths, left=starts, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("predicted roofline time of a step [µs]")
    assumed = plan.assumptions
    axes.set_title(f"{assumed['model']}, {assumed['drafter']}, {assumed['gpu']['name']}, context {assumed['context_tokens']}")
    axes.legend(title="phase")
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)
