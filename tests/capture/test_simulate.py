"""The simulator: what it conserves, closed forms, the published ladder's regret, and the regret of ours."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.capture.cli import main
from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies import BanditPolicy, FixedPolicy, GoodputPolicy, LadderPolicy, SchedulePolicy
from stepgraph.capture.schedule import Schedule
from stepgraph.capture.simulate.arrivals import Arrivals, bursty, poisson, read_arrivals
from stepgraph.capture.simulate.closed import fixed_runs, oracle_run, run_choices, run_policy
from stepgraph.capture.simulate.server import Server, Texts, draw_texts, serve
from stepgraph.capture.simulate.worlds import Rates, Recorded, Regimes, leviathan_cost, parse_world

KS = list(range(9))


def rng(seed=0):
    return np.random.default_rng(seed)


def batch_cost(ks=KS):
    """Verification that gets dearer with the batch, so that the best k falls with it."""
    rows = [(n, k, 10 + 0.4 * k + 0.12 * n * (k + 1)) for n in (1, 8, 64) for k in ks]
    return CostTable({"batch": n, "k": k, "context": 0, "step_ms": ms} for n, k, ms in rows)


def best_fixed(counts, cost, ks=KS):
    return min(fixed_runs(counts, cost, ks), key=lambda run: run.ms_per_token)


# -- worlds


@pytest.mark.parametrize("rates", [(0.8,), (0.9, 0.5, 0.7), (0.0,), (1.0,)])
def test_counts_have_the_law_of_the_rates(rates):
    world = Rates(rates)
    counts = world.draw(rng(), 40_000, 2, 5)
    survival = world.by_position(5).cumprod()
    np.testing.assert_allclose([(counts >= j + 1).mean() for j in range(5)], survival, atol=0.006)
    assert counts.min() >= 0
    assert counts.max() <= 5


def test_leviathans_closed_form():
    """Tokens a step of the i.i.d. world against (1 − α^(k+1)) / (1 − α), within 4 standard errors."""
    counts = Rates((0.8,)).draw(rng(1), 100_000, 1, 8)
    for run, k in zip(fixed_runs(counts, CostTable(leviathan_cost(0.05, KS)), KS), KS, strict=True):
        expected = (1 - 0.8 ** (k + 1)) / 0.2
        error = np.minimum(counts, k).std() / np.sqrt(len(counts))
        assert abs(run.tokens / run.steps - expected) <= 4 * error + 1e-12
        assert run.elapsed_ms == pytest.approx(run.steps * (1 + 0.05 * k))


def test_regimes_turn_together_and_last_as_long_as_they_should():
    counts = Regimes((Rates((1.0,)), Rates((0.0,))), 50).draw(rng(2), 20_000, 3, 4)
    assert set(np.unique(counts)) == {0, 4}
    assert (counts == counts[:, :1]).all()
    turns = (counts[1:, 0] != counts[:-1, 0]).sum()
    assert 20_000 / 50 * 0.8 < turns < 20_000 / 50 * 1.2


def test_recorded_counts_come_from_a_step_log(tmp_path):
    log = tmp_path / "steps.jsonl"
    steps = [{"k_run": 3, "requests": [4, 9], "accepted": [3, 0]}, {"k_run": 3, "requests": [9], "accepted": [2]},
             {"k_run": 0, "requests": [4], "accepted": [0]}]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, steps)))
    world = Recorded.load(log)
    assert world.sequences == ((3,), (0, 2))
    counts = world.draw(rng(), 101, 2, 2)
    assert counts.shape == (101, 2)
    assert set(np.unique(counts)) <= {0, 2}
    with pytest.raises(ValueError, match="k_max is 5; the recorded steps ran at k = 3"):
        world.draw(rng(), 1, 1, 5)
    log.write_text("\n".join(json.dumps(step | {"k_run": 3 - i}) for i, step in enumerate(steps[:2])))
    with pytest.raises(ValueError, match=r"steps\.jsonl has steps at k = \[2, 3\]"):
        Recorded.load(log)
    log.write_text("{")
    with pytest.raises(ValueError, match=r"step log steps\.jsonl cannot be read"):
        Recorded.load(log)


# -- a closed batch


def test_oracle_bounds_every_sequence_of_choices():
    cost, counts = CostTable(leviathan_cost(0.1, KS)), Rates((0.7,)).draw(rng(3), 400, 2, 8)
    oracle = oracle_run(counts, cost, KS)
    for seed in range(30):
        anything = run_choices("any", rng(seed).integers(len(KS), size=400), counts, cost, KS)
        assert anything.regret(oracle) >= 0
    assert all(run.regret(oracle) >= 0 for run in fixed_runs(counts, cost, KS))
    # In a world without chance there is nothing to foresee.
    certain = np.full((50, 2), 4)
    assert best_fixed(certain, cost).regret(oracle_run(certain, cost, KS)) == pytest.approx(0)
    assert best_fixed(certain, cost).name == "fixed:4"


def test_a_fixed_policy_is_its_vectorised_run():
    cost, counts = batch_cost(), Rates((0.6,)).draw(rng(4), 300, 4, 8)
    for k, run in zip(KS, fixed_runs(counts, cost, KS), strict=True):
        assert run_policy(f"fixed:{k}", FixedPolicy(k), counts, cost, KS, lag=1) == run


def test_the_published_ladder_is_up_to_14_percent_from_the_best_fixed_k():
    """α = 0.8, c = 0.05, one request, rungs 1, 3, 5, 7: an independent calculation gave up to 14 %."""
    cost = CostTable(leviathan_cost(0.05, KS))
    counts = Rates((0.8,)).draw(rng(), 60_000, 1, 8)
    run = run_policy("ladder", LadderPolicy({1: {"ks": [1, 3, 5, 7]}}), counts, cost, KS)
    assert 0.13 < run.regret(best_fixed(counts, cost)) < 0.15


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_goodput_that_knows_the_world_is_the_best_fixed_k(rate, batch):
    cost, counts = batch_cost(), Rates((rate,)).draw(rng(5), 20_000, batch, 8)
    run = run_policy("goodput", GoodputPolicy(cost, prior=rate, learn=False), counts, cost, KS)
    assert run.regret(best_fixed(counts, cost)) <= 0.01


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_goodput_that_learns_comes_within_a_percent(rate):
    cost, counts = batch_cost(), Rates((rate,)).draw(rng(6), 12_000, 2, 8)
    run = run_policy("goodput", GoodputPolicy(cost), counts, cost, KS, lag=1)
    assert run.regret(best_fixed(counts, cost)) <= 0.01


def test_goodput_beats_every_fixed_k_where_the_world_changes():
    cost = CostTable(leviathan_cost(0.15, KS))
    counts = Regimes((Rates((0.95,)), Rates((0.1,))), 400).draw(rng(7), 12_000, 2, 8)
    run = run_policy("goodput", GoodputPolicy(cost, memory=0.9), counts, cost, KS)
    assert run.regret(best_fixed(counts, cost)) < -0.05


def test_bandit_regret_is_sublinear():
    cost, counts = batch_cost(), Rates((0.7,)).draw(rng(8), 40_000, 1, 8)
    policy, regrets = BanditPolicy(cost), []
    for part in np.split(counts, 4):
        regrets.append(run_policy("bandit", policy, part, cost, KS).regret(best_fixed(part, cost)))
    assert regrets[-1] < 0.5 * regrets[0]
    assert regrets[-1] < 0.01


def test_a_policy_beyond_the_world_is_refused():
    with pytest.raises(ValueError, match=r"policy x may ask k=9; the world has 0, 1"):
        run_policy("x", FixedPolicy(9), np.zeros((1, 1), int), batch_cost(), KS)


# -- a server


def a_world(draw_seed, requests, per_s=50.0, rate=0.7, k_max=4):
    generator = rng(draw_seed)
    arrivals = poisson(generator, requests, per_s, 20, 12)
    return arrivals, draw_texts(Rates((rate,)), arrivals, generator, k_max)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 30), st.floats(1, 500), st.integers(1, 6), st.integers(0, 2), st.integers(1, 40))
def test_nothing_is_lost_and_time_goes_forward(seed, requests, per_s, max_batch, lag, chunk):
    arrivals, texts = a_world(seed, requests, per_s)
    server = Server(batch_cost(range(5)), 0.5, max_batch, chunk, lag)
    policy = GoodputPolicy(server.cost, hold_steps=2, probe_interval=5)
    run = serve("goodput", policy, server, arrivals, texts)
    assert (run.requests, run.tokens) == (requests, arrivals.output.sum())
    assert sum(run.steps_at_k.values()) == run.steps
    assert run.steps <= run.request_steps <= run.steps * max_batch
    prefill_ms = 0.5 * (arrivals.prompt - 1).sum()
    assert run.elapsed_ms >= run.decode_ms + prefill_ms - 1e-6
    assert run.elapsed_ms <= arrivals.at_ms[-1] + run.decode_ms + prefill_ms + 1e-6
    assert (run.ttft_ms > 0.5 * (arrivals.prompt - 1)).all()
    assert (run.tpot_ms >= 0).all()  # 0 where the first step was the last
    assert run.request_steps <= run.tokens <= run.request_steps * 5


def test_a_server_by_hand():
    """Two requests, one place: the second waits; 3 prompt tokens at 2 ms, steps of 10 ms at k = 1."""
    cost = CostTable([{"batch": 1, "k": 1, "context": 0, "step_ms": 10.0}])
    arrivals = Arrivals(np.array([0.0, 5.0]), np.array([4, 1]), np.array([3, 2]))
    texts = Texts(np.array([1, 0, 0, 0, 1]), np.array([0, 3]), 1)
    run = serve("fixed:1", FixedPolicy(1), Server(cost, 2.0, max_batch=1), arrivals, texts)
    # Request 0: prompt until 6, tokens 2 at 16, 1 at 26. Request 1: one token at 36, one at 46.
    assert run.elapsed_ms == 46
    assert run.ttft_ms.tolist() == [16, 31]
    assert run.tpot_ms.tolist() == [5, 10]
    assert (run.steps, run.request_steps, run.tokens, run.decode_ms) == (4, 4, 5, 40)


def test_all_policies_serve_the_same_texts_and_the_oracle_is_best():
    arrivals, texts = a_world(9, 60, per_s=30)
    server = Server(batch_cost(range(5)), 0.1, 8)
    schedule = SchedulePolicy(Schedule.parse([[1, 4, 4], [5, 8, 1]]))
    runs = [serve("p", policy, server, arrivals, texts) for policy in (None, FixedPolicy(0), FixedPolicy(4), schedule)]
    assert len({run.tokens for run in runs}) == 1
    assert all(run.regret(runs[0]) >= -0.005 for run in runs)  # a step's best is not a run's, but nearly


def test_lag_delays_what_a_policy_learns():
    arrivals, texts = a_world(10, 30)

    class Spy(FixedPolicy):
        def __init__(self):
            super().__init__(2)
            self.events = []

        def choose(self, batch, context=None, requests=None):
            self.events.append("choose")
            return super().choose(batch)

        def observe(self, k_run, accepted, lag=0, requests=None):
            assert len(accepted) == len(requests)
            self.events.append("observe")

    spies = [Spy(), Spy()]
    for lag, spy in enumerate(spies):
        serve("spy", spy, Server(batch_cost(range(5)), lag=lag), arrivals, texts)
    assert spies[0].events[:4] == ["choose", "observe", "choose", "observe"]
    assert spies[1].events[:4] == ["choose", "choose", "observe", "choose"]


# -- arrivals


def test_arrivals_come_at_their_rate():
    for arrivals in (poisson(rng(), 20_000, 40, 50, 30), bursty(rng(), 20_000, 40, 8, 2, 50, 30)):
        assert 20_000 / arrivals.at_ms[-1] * 1e3 == pytest.approx(40, rel=0.1)
        assert (np.diff(arrivals.at_ms) >= 0).all()
        assert arrivals.prompt.mean() == pytest.approx(50, rel=0.05)
        assert arrivals.output.min() >= 1
    even, uneven = (np.histogram(a.at_ms, 300)[0].var() for a in (poisson(rng(), 20_000, 40, 1, 1), arrivals))
    assert uneven > 3 * even


def test_arrivals_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("model,output_tokens,timestamp,prompt_tokens\na,7,12.5,100\nb,1,10,3\n")
    arrivals = read_arrivals(path)
    assert arrivals.at_ms.tolist() == [0, 2500]
    assert arrivals.prompt.tolist() == [3, 100]
    assert arrivals.output.tolist() == [1, 7]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no column timestamp"),
        ("timestamp,prompt_tokens\n1,2\n", "no column output_tokens"),
        ("timestamp,prompt_tokens,output_tokens\n", "has no requests"),
        ("timestamp,prompt_tokens,output_tokens\n1,2,3\n1,0,3\n", "line 3: prompt_tokens is 0"),
        ("timestamp,prompt_tokens,output_tokens\nsoon,2,3\n", "line 2: timestamp is 'soon'; it must be a number"),
        ("timestamp,prompt_tokens,output_tokens\n0,2.5,3\n", "line 2: prompt_tokens is '2.5'; it must be an integer"),
        ("timestamp,prompt_tokens,output_tokens\nnan,2,3\n", "line 2: timestamp is nan"),
        ("timestamp,prompt_tokens,output_tokens\n1,2\n", "line 2"),
    ],
)
def test_damaged_arrivals_are_named(tmp_path, text, reason):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"arrivals file trace\.csv.*{reason}"):
        read_arrivals(path)


# -- the command


def test_command_is_deterministic_by_seed(capsys):
    arguments = ["simulate", "--world", "regimes:50:0.9,0.5/0.2", "--steps", "500", "--batch", "3", "--json", "-"]
    documents = []
    for seed in ("1", "1", "2"):
        assert main([*arguments, "--seed", seed]) == 0
        documents.append(json.loads(capsys.readouterr().out))
        documents[-1].pop("seconds")
    assert documents[0] == documents[1]
    assert documents[0]["rows"] != documents[2]["rows"]
    names = [row["name"] for row in documents[0]["rows"]]
    assert names == ["oracle", *(f"fixed:{k}" for k in KS), "ladder", "goodput", "bandit"]


def test_command_with_arrivals_and_a_profile(tmp_path, capsys):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"schema": "stepgraph.profile/1", "rows": batch_cost([0, 1, 3]).rows}))
    policy = 'goodput:{"margin": 0.05, "hold_steps": 4}'
    arguments = ["--arrivals", "bursty:20:5:1", "--requests", "30", "--output-tokens", "10", "--policy", policy, "--lag", "1"]
    out = tmp_path / "out.json"
    assert main(["simulate", "--cost", str(profile), *arguments, "--json", str(out)]) == 0
    assert "best fixed k" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["oracle", "fixed:0", "fixed:1", "fixed:3", policy]
    assert len({row["tokens"] for row in rows}) == 1
    assert set(rows[0]["ttft_ms"]) == {"p50", "p90", "p99"}


@pytest.mark.parametrize(("recorded", "ks"), [(16, [0, 1, 3]), (2, [0, 1])])
def test_a_recorded_world_takes_the_ks_of_the_profile_that_it_knows(recorded, ks, tmp_path, capsys):
    log, profile = tmp_path / "log.jsonl", tmp_path / "profile.json"
    log.write_text(json.dumps({"k_run": recorded, "requests": [0], "accepted": [1]}) + "\n")
    profile.write_text(json.dumps({"schema": "stepgraph.profile/1", "rows": batch_cost([0, 1, 3]).rows}))
    arguments = ["simulate", "--world", f"recorded:{log}", "--steps", "20", "--json", "-"]
    assert main([*arguments, "--cost", str(profile)]) == 0
    assert json.loads(capsys.readouterr().out)["ks"] == ks
    assert main(arguments) == 0  # and without one all of its own
    assert json.loads(capsys.readouterr().out)["ks"] == list(range(recorded + 1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--world", "iid"], "world is 'iid'"),
        (["--world", "iid:2"], "a rate of the world is 2"),
        (["--world", "regimes:9:0.5"], "at least two worlds"),
        (["--world", "regimes:9:" + "/".join(["0.5"] * 70)], "regimes has 70 worlds; it needs at least two"),
        (["--steps", "100000000", "--batch", "65536"], "steps times batch must be at most 1000000000"),
        (["--arrivals", "bursty:1:2:1e-6"], "make more than 1000000 periods for 500 requests"),
        (["--policy", "ladder:[]"], "--policy ladder: the options are []; they must be an object"),
        (["--policy", "ladder:null"], "--policy ladder: the options are None"),
        (["--world", "recorded:nowhere.jsonl"], "step log nowhere.jsonl cannot be read"),
        (["--arrivals", "poisson"], "arrivals is 'poisson'; allowed are closed"),
        (["--arrivals", "poisson:0"], "the rate of arrivals is 0"),
        (["--arrivals", "csv:nowhere.csv"], "arrivals file nowhere.csv cannot be read"),
        (["--cost", "nowhere.json"], "profile nowhere.json cannot be read"),
        (["--ks", "a"], "--ks is 'a'"),
        (["--ks", "99"], "a k in --ks is 99"),
        (["--policy", "oracle"], "--policy is 'oracle'; allowed are fixed:K"),
        (["--policy", "ladder:{"], "--policy ladder: the options are not JSON"),
        (["--policy", "fixed:12"], "policy fixed:12 may ask k=12"),
        (["--steps", "0"], "steps is 0"),
        (["--json", "/nowhere/rows.json"], "--json is '/nowhere/rows.json', which cannot be written"),
        (["--draft-cost", "-1"], "the draft cost c is -1"),
    ],
)
def test_command_refuses_in_one_sentence(arguments, reason, capsys):
    assert main(["simulate", "--steps", "10", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert reason in line


def test_a_world_of_a_thousand_times_a_thousand_steps_takes_seconds():
    """Counted, not timed: nothing is done once a step for what is known beforehand."""
    counts = parse_world("iid:0.8").draw(rng(), 10**6, 1, 8)
    cost = CostTable(leviathan_cost(0.05, KS))
    assert sum(run.steps for run in fixed_runs(counts, cost, KS)) == 9 * 10**6
    assert oracle_run(counts, cost, KS).steps == 10**6
