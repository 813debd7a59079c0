"""Device-chosen k: policies on device tensors inside the step, and the choice among the graphs of a bucket."""

import random
from itertools import pairwise

import pytest
import torch
from worlds import ScriptedDrafter, place, snapshot, text, tiny_model, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.phases import phase_of
from stepgraph.capture.policies.device import DeviceAcceptancePolicy, DevicePolicy, DeviceTablePolicy
from stepgraph.capture.schedule import Schedule
from stepgraph.capture.switch import SwitchGraphs, SwitchStep
from stepgraph.capture.trace import trace_step

KS = (0, 1, 3)
THRESHOLDS = (0.3, 0.6)
DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny")
PROMPTS = ([3, 1, 4, 1, 5, 9, 3, 1, 4], [2, 7, 1, 8, 2, 8, 1], [5], [6, 6, 6, 6])


class HostAcceptance:
    """The formula of `DeviceAcceptancePolicy` once more, in Python floats."""

    def __init__(self, decay: float, start: float, probe_every: int):
        self.decay, self.average, self.probe_every, self.resting = decay, start, probe_every, 0

    def level(self) -> int:
        return sum(threshold <= self.average for threshold in THRESHOLDS)

    def next_k(self, k: int, results: list[list[int]]) -> int:
        live = [row for row in results if row[0] >= 0]
        drafted, accepted = sum(row[2] for row in live), sum(row[3] for row in live)
        if drafted:
            self.average = self.decay * self.average + (1 - self.decay) * (accepted / drafted)
        if live:
            self.resting = self.resting + 1 if k == 0 else 0
        level = self.level()
        return KS[max(level, 1) if self.resting >= self.probe_every else level]


def acceptance_policy(**options) -> DeviceAcceptancePolicy:
    return DeviceAcceptancePolicy(KS, THRESHOLDS, **({"decay": 0.5, "start": 0.5, "probe_every": 3} | options))


def same_state(left, right) -> None:
    was, now = snapshot(right), snapshot(left)
    for name in was:
        assert torch.equal(was[name], now[name]), name


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_device_chosen_k_equals_the_same_k_chosen_on_the_host(drafter):
    """100 steps in which rows, batch and k change: tokens and every tensor of the state."""
    rng = random.Random(drafter)
    left, right = (tiny_step(drafter, draft_seed=1, max_len=96) for _ in range(2))
    switch = SwitchGraphs(SwitchStep(left, acceptance_policy()), (2, 4))
    by_host = StepGraphs(right, KeySet(GraphKey(batch, k) for batch in (2, 4) for k in KS), strict=True)
    host, k, ran = HostAcceptance(0.5, 0.5, 3), 1, []

    def refill(slot):
        prompt = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 20))]
        options = {"temperature": rng.choice([0.0, 0.7, 1.3]), "seed": rng.randrange(100), "limit": rng.randrange(40, 97)}
        for step in (left, right):
            place(step, slot, prompt, **options)

    for slot in range(4):
        refill(slot)
    for _ in range(100):
        slots = rng.sample(range(4), rng.randrange(1, 5))
        for step in (left, right):
            step.state.set_rows(slots)
        switch.replay(len(slots))
        key = by_host.replay(len(slots), k)
        same_state(left, right)
        assert int(switch.policy.ran_k) == k
        ran.append(k)
        k = host.next_k(k, right.state.results[: key.batch].tolist())
        assert float(switch.policy.average) == host.average
        for slot in range(4):
            if int(left.state.finished[slot]):
                refill(slot)
    assert [text(left, slot) for slot in range(4)] == [text(right, slot) for slot in range(4)]
    assert sum(switch.replays.values()) == switch.graphs.hits == 100
    assert switch.graphs.replays == by_host.replays
    assert len(set(ran)) > 1


def scripted_world(right_from: int, steps: int):
    """A drafter that is wrong below position `right_from` and right after it; returns the k of each step."""
    plain = tiny_step(max_len=256)
    place(plain, 0, PROMPTS[0])
    plain.state.set_rows([0])
    for _ in range(200):
        with torch.no_grad():
            plain(1, 0)
    truth = plain.state.history[0].clone()

    step = tiny_step(ScriptedDrafter(4, 256), max_len=256)
    place(step, 0, PROMPTS[0])
    step.drafter.script[0] = truth
    step.drafter.script[0, :right_from] = (truth[:right_from] + 1) % 61
    switch = SwitchGraphs(SwitchStep(step, acceptance_policy()), (1,))
    step.state.set_rows([0])
    ran = []
    for _ in range(steps):
        switch.replay(1)
        ran.append(int(switch.policy.ran_k))
    assert text(step, 0) == truth[: len(text(step, 0))].tolist()
    return ran


def test_k_0_probes_and_comes_back():
    """Case 44: with nothing drafted there is nothing to learn from, so k = 0 is left for one step after three."""
    ran = scripted_world(right_from=40, steps=50)
    # 0.5 starts at k = 1; one rejection makes it 0.25: k = 0, with a probe after each three steps.
    assert ran[:9] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    back = ran.index(3)
    assert set(ran[back:]) == {3}
    # While drafts are wrong, every probe is followed by rest.
    assert all(after == 0 for before, after in pairwise(ran[: back - 3]) if before == 1)
    assert scripted_world(right_from=999, steps=20) == [1, *[0, 0, 0, 1] * 5][:20]


def test_no_k_0_needs_no_probe():
    policy = DeviceAcceptancePolicy((1, 2), (0.5,), decay=0.0, probe_every=1)
    step = tiny_step("ngram")
    policy.update(step.state, 1, 2)
    assert int(policy.resting) == 0


def test_table_policy_follows_the_requests_that_still_run():
    schedule = Schedule.parse([[1, 1, 3], [2, 3, 1], [4, 9, 0]])
    left, right = (tiny_step("early-exit:1", max_len=64) for _ in range(2))
    for step in (left, right):
        for slot, prompt in enumerate(PROMPTS):
            place(step, slot, prompt, limit=len(prompt) + 4 + 8 * slot, temperature=0.8, seed=slot)
        step.state.set_rows([0, 1, 2, 3])
    switch = SwitchGraphs(SwitchStep(left, DeviceTablePolicy(schedule, 4)), (4,))
    by_host = StepGraphs(right, KeySet(GraphKey(4, k) for k in (0, 1, 3)), strict=True)
    running, ran = 4, []
    while running:
        k = schedule.k_for(running)
        switch.replay(4)
        by_host.replay(4, k)
        same_state(left, right)
        ran.append(int(switch.policy.ran_k))
        assert ran[-1] == k
        running = int((right.state.finished[:4] == 0).sum())
    assert list(dict.fromkeys(ran)) == [0, 1, 3]


def table_policy() -> DeviceTablePolicy:
    return DeviceTablePolicy(Schedule.parse([[1, 2, 3], [3, 4, 0]]), 4)


@pytest.mark.parametrize("policy", [acceptance_policy, lambda: acceptance_policy(start=0.0), table_policy])
def test_capture_and_padding_change_nothing_of_the_policy(policy):
    step = SwitchStep(tiny_step("ngram"), policy())
    before = {name: buffer.clone() for name, buffer in step.policy.named_buffers()}
    switch = SwitchGraphs(step, (2, 4))
    switch.capture()
    assert len(switch.graphs.captured) == 2 * len(step.policy.ks)
    step.state.set_rows([-1, -1])
    for _ in range(5):
        switch.replay(2)
    assert all(torch.equal(was, dict(step.policy.named_buffers())[name]) for name, was in before.items())
    switch.destroy()
    assert switch.graphs.captured == frozenset()
    assert switch.replay(1) == 2


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("policy", [acceptance_policy, table_policy])
def test_policy_is_in_the_traced_step_and_keeps_the_capture_contract(policy, k):
    """On fake CUDA tensors: no host read, no dynamic shape, nothing from the host."""
    step = tiny_step("draft-model:tiny")
    traced = trace_step(SwitchStep(step, policy()), 2, k, device="cuda")
    assert {"policy.next_body", "policy.ran_k"} <= set(traced.names)
    bare = len(trace_step(step, 2, k, device="cuda").nodes)
    assert {phase_of(node) for node in traced.nodes[bare:]} == {"advance"}


def test_index_of_the_body_stays_among_the_bodies():
    class Wild(DevicePolicy):
        def choose(self, results, live, k):
            return torch.tensor(7 if k else -7)

    policy, step = Wild((0, 2), 0), tiny_step("ngram")
    step.state.results[0, 0] = 5  # a live row
    policy.update(step.state, 1, 1)
    assert int(policy.next_body) == 1
    policy.update(step.state, 1, 0)
    assert int(policy.next_body) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: acceptance_policy(decay=1.5), "decay is 1.5; it must be a number from 0 to 1."),
        (lambda: acceptance_policy(probe_every=0), "probe_every is 0; it must be an integer at least 1."),
        (lambda: DeviceAcceptancePolicy((0, 1), (0.1, 0.2)), "thresholds has 2 values; 2 values of k need 1."),
        (lambda: DeviceAcceptancePolicy((0, 1, 2), (0.5, 0.5)), "thresholds must ascend strictly, but 0.5 follows 0.5."),
        (lambda: DeviceAcceptancePolicy((0, 1), ("x",)), "a threshold is 'x'; it must be a number from 0 to 1."),
        (lambda: DeviceAcceptancePolicy((2, 1), (0.5,)), "ks must ascend strictly, but 1 follows 2."),
        (lambda: DeviceAcceptancePolicy((), ()), "ks is empty; give at least one k."),
        (lambda: DevicePolicy((1, 2), 3), "first_k is 3; it must be one of ks, 1, 2."),
        (lambda: SwitchGraphs(SwitchStep(tiny_step("ngram"), acceptance_policy()), []), "buckets is []; it must be a strictly"),
        (lambda: SwitchGraphs(SwitchStep(tiny_step("ngram"), acceptance_policy()), [2, 2]), "buckets is [2, 2]; it must be"),
        (
            lambda: SwitchGraphs(SwitchStep(tiny_step("ngram"), acceptance_policy()), [2]).replay(3),
            "batch is 3; it must be an integer from 1 to 2.",
        ),
        (
            lambda: SwitchStep(tiny_step("ngram"), acceptance_policy(device="meta")),
            "the policy lives on meta, the state on cpu",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


# -- CUDA ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_switch_node_equals_the_same_k_chosen_on_the_host(drafter):
    pytest.importorskip("cuda.bindings")
    steps = [tiny_step(drafter, model=tiny_model(dtype=torch.float32).to("cuda"), draft_seed=1, max_len=512) for _ in "ab"]
    left, right = steps
    for step in steps:
        for slot, prompt in enumerate(PROMPTS):
            place(step, slot, prompt, temperature=0.9 * (slot % 2), seed=slot)
        step.state.set_rows([2, 0, 1])
    switch = SwitchGraphs(SwitchStep(left, acceptance_policy(device="cuda")), (4,))
    by_host = StepGraphs(right, KeySet(GraphKey(4, k) for k in KS), strict=True)
    before = snapshot(switch.step)
    switch.capture()
    assert all(torch.equal(was, now) for was, now in zip(before.values(), snapshot(switch.step).values(), strict=True))
    host, k, ran = HostAcceptance(0.5, 0.5, 3), 1, []
    for _ in range(100):
        assert switch.replay(3) == 4
        by_host.replay(3, k)
        same_state(left, right)
        ran.append(k)
        k = host.next_k(k, right.state.results[:4].tolist())
        assert float(switch.policy.average) == host.average
    assert len(set(ran)) > 1
    torch.cuda.synchronize()
    switch.destroy()


@pytest.mark.gpu
def test_switch_node_allocates_nothing_and_waits_for_nobody():
    pytest.importorskip("cuda.bindings")
    step = tiny_step("early-exit:1", model=tiny_model(dtype=torch.float32).to("cuda"), max_len=512)
    place(step, 0, PROMPTS[0])
    switch = SwitchGraphs(SwitchStep(step, acceptance_policy(device="cuda")), (1,))
    switch.capture()
    step.state.set_rows([0])
    switch.replay(1)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            switch.replay(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
