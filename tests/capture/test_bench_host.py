"""`stepgraph bench host`: what it measures, and that the host keeps nothing of requests that are gone."""

import json
import tracemalloc

import pytest

from stepgraph.capture.bench_host import engine_without_steps, host_row
from stepgraph.capture.cli import main
from stepgraph.capture.request import SamplingParams


def test_requests_run_to_their_ends_without_a_step():
    """Four requests of 255 steps each, staggered; each end is a step of turnover, and so is the start that follows it."""
    row = host_row(batch=4, k=3, steps=280)
    assert row["requests"] >= 4
    assert 8 <= row["turnover_steps"] <= 2 * row["requests"]
    assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
    assert row["turnover_p50_us"] > 0


def test_a_run_without_turnover_says_so(capsys):
    assert host_row(batch=1, k=3, steps=5)["turnover_p50_us"] is None
    assert main(["bench", "host", "--batches", "1", "--steps", "5"]) == 0
    assert "0 %" in capsys.readouterr().out


def test_memory_does_not_grow_with_requests():
    """3,000 requests, all 64 slots in use; two floats kept of each would show as 200,000 bytes."""
    engine, _ = engine_without_steps(batch=64, k=3, max_len=16)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)

    def serve(requests: int) -> int:
        done = 0
        while done < requests:
            while engine.unfinished < 64:
                engine.add([1], params)
            done += len(engine.step())
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(500)
        grown = serve(3000) - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000


def test_command(capsys):
    assert main(["bench", "host", "--batches", "1", "3", "--steps", "5", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["batch"], row["k"], row["steps"]) for row in rows] == [(1, 3, 5), (3, 3, 5)]


@pytest.mark.parametrize(("argument", "message"), [("--steps", "--steps is 0"), ("--batches", "--batches is 0")])
def test_bad_arguments(argument, message, capsys):
    assert main(["bench", "host", argument, "0"]) == 2
    assert message in capsys.readouterr().err
