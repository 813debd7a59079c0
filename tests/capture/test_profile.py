"""`stepgraph profile` and `bench serve` on tiny models: what they write is what schedules, policies and the simulator read."""

import json

import numpy as np
import pytest

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.cli import main
from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies import make_adaptive, make_policy
from stepgraph.capture.policies.adaptive import expected_tokens
from stepgraph.capture.profile.measure import best_schedule, measure_acceptance, measure_costs
from stepgraph.capture.replay_timer import quantiles
from stepgraph.capture.request import SamplingParams
from stepgraph.capture.serve import serve_engine, texts_of
from stepgraph.capture.simulate.arrivals import Arrivals
from stepgraph.capture.simulate.server import Server, serve
from stepgraph.model.checkpoint import load_model

TINY = ["--model", "random:tiny-llama", "--drafter", "early-exit:1"]


def test_the_profile_feeds_everything_that_reads_one(tmp_path, capsys):
    out, prompts = tmp_path / "profile.json", tmp_path / "prompts.jsonl"
    sizes = ["--batches", "1,3", "--ks", "0,2,4", "--contexts", "8,40", "--rounds", "2", "--prompts", "none"]
    assert main(["profile", *TINY, *sizes, "--out", str(out)]) == 0
    assert "k = 4, ms" in capsys.readouterr().out
    document = json.loads(out.read_text())
    places = {(row["batch"], row["k"], row["context"]) for row in document["rows"]}
    assert places == {(n, k, context) for n in (1, 3) for k in (0, 2, 4) for context in (8, 40)}
    assert all(0 < row["p20_ms"] <= row["step_ms"] <= row["p80_ms"] and row["replays"] == 2 for row in document["rows"])
    assert document["acceptance"] is None
    assert document["prefill_ms_per_token"] > 0
    assert {"git", "cpu"} <= set(document["env"])
    assert CostTable.load(out).ks == {0, 2, 4}
    assert make_adaptive("goodput", {"cost": str(out)}).choose(2, 20) in {0, 2, 4}
    assert not list(tmp_path.glob("*.partial"))
    assert main(["simulate", "--cost", str(out), "--steps", "50"]) == 0

    # With acceptance, the file is a schedule too; the prompts of a model without a tokenizer are refused by name.
    document["num_speculative_tokens_per_batch_size"] = best_schedule(CostTable.load(out), [0.9, 0.8], 3)
    out.write_text(json.dumps(document))
    assert make_policy(schedule=str(out)).ks <= {0, 2, 4}
    prompts.write_text('{"id": "a", "category": "b", "prompt": "1,2,3"}')
    assert main(["profile", *TINY, "--prompts", str(prompts), "--out", str(out)]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_a_profile_written_through_a_link_leaves_the_link(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "kept" / "profile.json"
    target.parent.mkdir()
    link.symlink_to(target)
    sizes = ["--batches", "1", "--ks", "0", "--contexts", "4", "--rounds", "1", "--prompts", "none"]
    for _ in range(2):  # first to nothing, then over the first
        assert main(["profile", *TINY, *sizes, "--out", str(link)]) == 0
        assert link.is_symlink()
        assert CostTable.load(target).ks == {0}
    assert [path.name for path in target.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--batches", "0"], "a number in --batches is 0"),
        (["--ks", "x"], "--ks is 'x'"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--prompts", "nothing"], "prompt set is 'nothing'"),
        (["--out", "/nowhere/at/all.json"], "--out is '/nowhere/at/all.json'"),
    ],
)
def test_profile_refuses_in_one_sentence(arguments, reason, tmp_path, capsys):
    assert main(["profile", *TINY, "--out", str(tmp_path / "p.json"), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert reason in line


def test_costs_are_of_the_keys_asked_for():
    options = EngineOptions("random:tiny-llama", "ngram")
    rows = measure_costs(options, load_model("random:tiny-llama"), [2], [1], [30], rounds=3)
    assert [(row["batch"], row["k"], row["context"], row["replays"]) for row in rows] == [(2, 1, 30, 3)]
    assert quantiles([3, 1, 2, 4, 5]) == {"p20": 1.8, "p50": 3, "p80": pytest.approx(4.2)}


def test_acceptance_counts_steps_without_a_draft():
    """Look-up has no draft in most steps; the tokens of a step follow from `reached`, not from `per_position`."""
    found = measure_acceptance(
        EngineOptions("random:tiny-llama", "ngram"), load_model("random:tiny-llama"), 3, ["1,2,3,1,2,3", "9,9,9", "5"],
        SamplingParams(max_new_tokens=20),
    )  # fmt: skip
    assert expected_tokens(np.array(found["reached"]))[-1] == pytest.approx(found["acceptance_length"])
    assert found["reached"][0] <= found["per_position"][0]
    assert found["tokens"] == 60


def test_best_schedule_is_the_argmax_within_its_margin():
    rows = [(n, k, 10 + 0.4 * k + 0.3 * n * (k + 1)) for n in (1, 64) for k in range(6)]
    cost = CostTable({"batch": n, "k": k, "context": 0, "step_ms": ms} for n, k, ms in rows)
    rates = [0.8, 0.7, 0.7]
    exact = best_schedule(cost, rates, 64, margin=0.0)
    expected = expected_tokens(np.array([0.8, 0.7, 0.7, 0.7, 0.7]))
    for first, last, k in exact:
        for batch in (first, last):
            assert k == max(range(6), key=lambda k, batch=batch: expected[k] / cost.step_ms(batch, k))
    assert [first for first, _, _ in exact[1:]] == [last + 1 for _, last, _ in exact[:-1]]
    assert (exact[0][0], exact[-1][1]) == (1, 64)
    assert exact[0][2] > exact[-1][2]
    assert len(best_schedule(cost, rates, 64, margin=0.1)) < len(exact)
    assert best_schedule(cost, [], 2) == [[1, 2, 0]]


def test_engine_and_simulator_take_the_same_steps():
    """Arrivals a long way apart or all at once leave nothing to timing, so the simulator has to count as the engine did."""
    engine = build_engine(
        EngineOptions("random:tiny-llama", "early-exit:1", k=2, max_batch=3, max_len=64, dtype="float64", prefill_chunk=16)
    ).engine
    engine.graphs.capture()
    arrivals = Arrivals(np.zeros(7), np.array([5, 1, 9, 3, 12, 2, 7]), np.array([9, 14, 1, 6, 11, 3, 8]))
    prompts = [[n + 1] * length for n, length in enumerate(arrivals.prompt.tolist())]
    observed = serve_engine("fixed", engine, arrivals, prompts, SamplingParams())
    real = observed.run
    assert (real.requests, real.tokens) == (7, 52)
    assert sum(map(len, observed.counts)) == real.request_steps
    assert (real.ttft_ms > 0).all()
    assert len(real.tpot_ms) == 6
    assert engine.on_step is None
    cost = CostTable([{"batch": 1, "k": 2, "context": 0, "step_ms": 1.0}])
    texts = texts_of(observed, arrivals, 2, np.random.default_rng(0))
    simulated = serve("fixed", make_policy(2), Server(cost, 0.01, 3, 16), arrivals, texts)
    assert (simulated.steps, simulated.request_steps, simulated.tokens) == (real.steps, real.request_steps, real.tokens)
    assert simulated.report().keys() == real.report().keys()


def test_requests_wait_for_their_time():
    engine = build_engine(EngineOptions("random:tiny-llama", "none", max_batch=1, max_len=32)).engine
    slept, now = [], [100.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    arrivals = Arrivals(np.array([0.0, 5000.0]), np.array([2, 2]), np.array([3, 2]))
    run = serve_engine("k=0", engine, arrivals, [[1, 2], [3, 4]], SamplingParams(), lambda: now[0], sleep).run
    assert slept == [pytest.approx(5.0)]
    assert run.tokens == 5
    assert run.elapsed_ms == pytest.approx(5000)


def test_time_to_the_first_token_counts_the_wait_for_a_step_to_end():
    engine = build_engine(EngineOptions("random:tiny-llama", "none", max_batch=2, max_len=32)).engine
    ticks = iter(range(100, 200))
    arrivals = Arrivals(np.array([0.0, 400.0]), np.array([2, 2]), np.array([3, 2]))
    run = serve_engine("k=0", engine, arrivals, [[1, 2], [3, 4]], SamplingParams(), lambda: float(next(ticks))).run
    assert run.ttft_ms[0] > 1000  # both are seen at the first look, a second after the start
    assert run.ttft_ms[1] > 600


@pytest.mark.parametrize(
    "choice",
    [
        ["--k", "1"], ["--policy", "goodput"], ["--policy", "ladder"],
        ["--policy", "ladder", "--policy-options", '{"slots": {"1": {"ks": [2, 4]}}}'],
        ["--policy", "bandit", "--policy-options", '{"ks": [0, 2]}'],
    ],
)  # fmt: skip
def test_bench_serve_compares_both(choice, tmp_path, capsys):
    out = tmp_path / "serve.json"
    load = ["--arrivals", "poisson:200", "--requests", "6", "--prompt-tokens", "4", "--output-tokens", "5", "--max-batch", "2"]
    assert main(["bench", "serve", *TINY, *load, *choice, "--rounds", "1", "--json", str(out)]) == 0
    assert "simulator" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["engine"]["tokens"] == document["simulator"]["tokens"]
    assert document["errors"].keys() >= {"tokens_per_s", "tpot_ms.p50"}


def test_bench_serve_of_answers_without_a_second_token(capsys):
    """There is no time per further token then, on either side."""
    load = ["--arrivals", "poisson:200", "--requests", "3", "--prompt-tokens", "4", "--output-tokens", "1", "--max-batch", "2"]
    assert main(["bench", "serve", *TINY, *load, "--k", "1", "--rounds", "1", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["engine"]["tpot_ms"] is document["simulator"]["tpot_ms"] is document["errors"]["tpot_ms.p50"] is None
    assert document["errors"]["ttft_ms.p50"] is not None


@pytest.mark.parametrize(
    ("options", "reason"), [("{", "--policy-options is not JSON"), ('{"ema": 2}', "ema is 2"), ('{"kz": 2}', "no option 'kz'")]
)
def test_bench_serve_refuses_options_before_it_measures(options, reason, monkeypatch, capsys):
    monkeypatch.setattr("stepgraph.capture.bench_serve.load_target", None)
    assert main(["bench", "serve", *TINY, "--policy", "ladder", "--policy-options", options]) == 2
    assert reason in capsys.readouterr().err


def test_bench_serve_refuses_what_does_not_fit(capsys):
    assert main(["bench", "serve", *TINY, "--max-len", "3", "--requests", "2"]) == 2
    assert "max_len is 3; the longest request has" in capsys.readouterr().err
