"""Counters and their denominators (cases 43, 45, 46), and the text that a scraper reads."""

import builtins

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.cli import main
from stepgraph.capture.launched import StepRecord
from stepgraph.capture.metrics import StepMetrics, prometheus_text
from stepgraph.capture.request import SamplingParams


def record(k, drafted, accepted, **fields):
    defaults = {"step": 0, "batch": len(drafted), "k_asked": k, "k_run": k, "key": "1x1", "reason": None, "padding": 0}
    live = {"requests": list(range(len(drafted))), "drafted": drafted, "accepted": accepted, "lag": 0}
    return StepRecord(**{**defaults, **live, **fields})


def test_case_43_a_position_is_counted_by_the_steps_that_drafted_that_far():
    metrics = StepMetrics()
    metrics.observe(record(3, [3], [3]))
    metrics.observe(record(1, [1], [1]))
    assert metrics.drafted_at == {0: 2, 1: 1, 2: 1}
    assert metrics.accepted_at == {0: 2, 1: 1, 2: 1}
    metrics.observe(record(0, [0, 0], [0, 0], key=None, reason="no graph", padding=2))
    assert metrics.drafted_at == {0: 2, 1: 1, 2: 1}
    assert metrics.steps == {3: 1, 1: 1, 0: 1}
    assert metrics.request_steps == {3: 1, 1: 1, 0: 2}
    assert (metrics.tokens, metrics.padding_rows, dict(metrics.eager_steps)) == (8, 2, {"no graph": 1})


def scraped(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_agrees_with_the_engines_report():
    engine = build_engine(EngineOptions("random:tiny-llama", "ngram", k=2, max_batch=2, max_len=64)).engine
    metrics = StepMetrics()
    engine.on_step = metrics.observe
    engine.generate([[1, 2, 3, 1, 2], [4], [5, 5, 5]], SamplingParams(max_new_tokens=12))
    values, report = scraped(prometheus_text(engine, metrics)), engine.report()
    assert values["stepgraph_tokens_total",] == report["tokens"]
    assert values["stepgraph_steps_total", "2"] == report["steps"]
    assert values["stepgraph_request_steps_total", "2"] == report["request_steps"]
    assert values["stepgraph_requests_finished_total",] == 3
    assert values["stepgraph_requests_running",] == values["stepgraph_requests_waiting",] == 0
    rates = [
        values.get(("stepgraph_accepted_tokens_total", str(j)), 0) / values["stepgraph_drafted_tokens_total", str(j)]
        for j in range(len(report["per_position_acceptance"]))
    ]
    assert rates == pytest.approx(report["per_position_acceptance"])


def test_command_writes_a_file(tmp_path):
    path, log = tmp_path / "stepgraph.prom", tmp_path / "steps.jsonl"
    arguments = ["1,2,3", "--model", "random:tiny-llama", "--max-new-tokens", "5", "--metrics", str(path)]
    assert main(["generate", *arguments, "--log-steps", str(log)]) == 0
    values = scraped(path.read_text())
    assert values["stepgraph_tokens_total",] == 5
    assert values["stepgraph_steps_total", "3"] == len(log.read_text().splitlines())


def test_without_the_package_it_says_so(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"pip install 'stepgraph\[metrics\]'"):
        prometheus_text(None, StepMetrics())
