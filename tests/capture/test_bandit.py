"""The bandit: which arms it plays, and how long."""

import random

import numpy as np
from policy_cases import KS, draws, table

from stepgraph.capture.policies import BanditPolicy


def test_bandit_plays_every_arm_then_mostly_the_best():
    cost, rng = table(lambda batch, k: 10 + k), random.Random(5)
    truth = [0.6] * 5
    value = [sum(0.6**j for j in range(k + 1)) / cost.step_ms(2, k) for k in KS]
    policy, regret, ks = BanditPolicy(cost), [], []
    for _ in range(20_000):
        ks.append(policy.choose(2))
        regret.append(max(value) - value[ks[-1]])
        policy.observe(ks[-1], draws(truth, ks[-1], 2, rng))
    assert set(ks[: 6 * 8]) == set(KS)
    early, late = np.mean(regret[:2000]), np.mean(regret[-2000:])
    assert late < 0.35 * early
    assert late < 0.01 * max(value)


def test_bandit_holds_its_arm_and_keeps_batches_apart():
    policy = BanditPolicy(table(), hold_steps=5)
    ks = []
    for _ in range(60):
        ks.append(policy.choose(1))
        policy.observe(ks[-1], [0])
    changes = [i for i in range(1, 60) if ks[i] != ks[i - 1]]
    assert all(change % 5 == 0 for change in changes)
    assert policy.choose(16) == 0  # an octave never played begins anew
