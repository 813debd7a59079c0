"""Counters of a running engine, in the text format that Prometheus scrapes.

Totals only grow; every rate is left to whoever reads two scrapes, and each total stands beside the one it is to be divided by:
accepted and drafted drafts by position, tokens and request-steps, steps by k. Gauges say what is now.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from stepgraph.capture.engine import Engine
from stepgraph.capture.launched import StepRecord

PREFIX = "stepgraph"


class StepMetrics:
    """Totals over steps, as they finish; `engine.on_step = metrics.observe`.

    Attributes:
        steps: by k.
        request_steps: live rows of all steps, by k: the denominator of tokens per step.
        tokens: emitted.
        drafted_at, accepted_at: drafts by position, from 0; a position is counted by the steps that drafted that far.
        padding_rows: rows of graphs that no request used.
        eager_steps: steps without a graph, by reason.
    """

    def __init__(self):
        self.steps: Counter[int] = Counter()
        self.request_steps: Counter[int] = Counter()
        self.tokens = 0
        self.drafted_at: Counter[int] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self.padding_rows = 0
        self.eager_steps: Counter[str] = Counter()

    def observe(self, record: StepRecord) -> None:
        """Count a finished step."""
        self.steps[record.k_run] += 1
        self.request_steps[record.k_run] += len(record.accepted)
        self.padding_rows += record.padding
        if record.key is None:
            self.eager_steps[record.reason or "asked for"] += 1
        for drafted, accepted in zip(record.drafted, record.accepted, strict=True):
            self.tokens += accepted + 1
            self.drafted_at.update(range(drafted))
            self.accepted_at.update(range(accepted))


class EngineCollector:
    """A collector for `prometheus_client` registries.

    Args:
        engine: whose waiting and running requests are shown.
        metrics: its totals.
    """

    def __init__(self, engine: Engine, metrics: StepMetrics):
        self.engine, self.metrics = engine, metrics

    def collect(self) -> list[Any]:
        """Metric families of the moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def counter(name: str, text: str, values: dict[Any, float], label: str | None = None):
            family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label] if label else [])
            for key, value in sorted(values.items(), key=str):
                family.add_metric([str(key)] if label else [], value)
            return family

        totals, scheduler, stats = self.metrics, self.engine.scheduler, self.engine.stats
        gauges = {
            "requests_running": ("Requests that decode.", len(scheduler.running)),
            "requests_prefilling": ("Requests whose prompt is being run.", len(scheduler.prefilling)),
            "requests_waiting": ("Requests that wait for a slot.", len(scheduler.waiting)),
        }
        return [
            counter("steps", "Decoding steps by k.", totals.steps, "k"),
            counter("request_steps", "Live rows of decoding steps by k.", totals.request_steps, "k"),
            counter("tokens", "Tokens emitted.", {None: totals.tokens}),
            counter("drafted_tokens", "Drafts by position.", totals.drafted_at, "position"),
            counter("accepted_tokens", "Accepted drafts by position.", totals.accepted_at, "position"),
            counter("padding_rows", "Rows of graphs that no request used.", {None: totals.padding_rows}),
            counter("eager_steps", "Steps without a graph by reason.", totals.eager_steps, "reason"),
            counter("requests_finished", "Requests finished.", {None: stats.requests}),
            counter("repaired_rows", "Rows of logits that were not finite.", {None: stats.repaired}),
            *(GaugeMetricFamily(f"{PREFIX}_{name}", text, value) for name, (text, value) in gauges.items()),
        ]


def prometheus_text(engine: Engine, metrics: StepMetrics) -> str:
    """One scrape, as text.

    Raises:
        ValueError: the package prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise ValueError("metrics need the package prometheus-client: pip install 'stepgraph[metrics]'") from None
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, metrics))
    return generate_latest(registry).decode("utf-8")


def write_prometheus(path: str | Path, engine: Engine, metrics: StepMetrics) -> None:
    """Write a scrape to a file, as the text-file collector of node exporters reads it."""
    Path(path).write_text(prometheus_text(engine, metrics), encoding="utf-8")
