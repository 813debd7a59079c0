"""Saved policy state that was edited or damaged: refused where it is read, in one sentence, and never run with."""

import copy
import json
import random

import pytest

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies import BanditPolicy, GoodputPolicy, LadderPolicy, make_policy, policy_from_dict

WRONG = (None, float("nan"), float("inf"), -1, 10**400, "x", "", True, [], {}, [None], {"a": 1}, [[]], 1.5, 99, [-1, -1])


def steps(policy, count: int, seed: int) -> list[int]:
    rng, ks = random.Random(seed), []
    for _ in range(count):
        requests = list(range(rng.randint(1, 9)))
        ks.append(policy.choose(len(requests), 100, requests))
        policy.observe(ks[-1], [rng.randint(0, ks[-1]) for _ in requests], 0, requests)
    return ks


def saved(kind: str) -> dict:
    """State after some steps, as a file holds it."""
    cost = CostTable({"batch": n, "k": k, "context": 64, "step_ms": 10 + k + n} for n in (1, 4) for k in range(4))
    policy = {
        "ladder": LadderPolicy({1: {"ks": [0, 1, 3, 5]}, 4: {"ks": [0, 2]}}),
        "goodput": GoodputPolicy(cost),
        "bandit": BanditPolicy(cost),
        "fixed": make_policy(k=3),
        "schedule": make_policy(schedule=[[1, 4, 5], [5, 16, 3]]),
    }[kind]
    steps(policy, 60, 0)
    return json.loads(json.dumps(policy.to_dict()))


def places(value, at=()):
    """Every place in nested JSON, of long lists the first two."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


@pytest.mark.parametrize("kind", ["ladder", "goodput", "bandit", "fixed", "schedule"])
def test_no_damage_goes_further_than_reading(kind):
    """Each value in turn is replaced or removed: the state is refused with a sentence, or runs and can be saved again."""
    whole = saved(kind)
    assert json.loads(json.dumps(policy_from_dict(whole).to_dict())) == whole
    reasons = []
    for place in places(whole):
        for wrong in (*WRONG, "removed"):
            data = copy.deepcopy(whole)
            inner = data
            for key in place[:-1]:
                inner = inner[key]
            if wrong == "removed":
                del inner[place[-1]]
            else:
                inner[place[-1]] = wrong
            try:
                policy = policy_from_dict(data)
            except ValueError as error:
                reasons.append(str(error))
            else:
                steps(policy, 12, 1)
                json.dumps(policy.to_dict(), allow_nan=False)
    assert len(reasons) > 10
    assert not [reason for reason in reasons if "iterable" in reason or "unpack" in reason]


@pytest.mark.parametrize(
    ("kind", "place", "value", "reason"),
    [
        ("ladder", ["state"], [], r"state in the saved state is \[\]; it must be an object"),
        ("ladder", ["state"], {}, r"the saved state has slots \[\]; the ladder has \[1, 4\]"),
        ("ladder", ["state", "4", "k"], 3, r"k of slot 4 in the saved state is 3; it must be one of \[0, 2\]"),
        ("ladder", ["state", "1", "k"], 3.0, "k of slot 1 is 3.0; it must be an integer"),
        ("ladder", ["state", "1", "average"], float("nan"), "average of slot 1 in the saved state is nan"),
        ("goodput", ["state", "all"], [[5, 0, 0], [4, 0, 0]], "all in the saved state has 5 accepted of 4 drafts"),
        ("goodput", ["state", "all"], [[0], [0]], r"all in the saved state is \[0\]; it must be a list of 3"),
        ("goodput", ["state", "row", "0"], 99, "a row in the saved state is 99"),
        ("goodput", ["state", "row"], {"0": 1, "1": 1}, "no two requests may have the same"),
        ("goodput", ["state", "age"], -1, "age in the saved state is -1"),
        ("bandit", ["state", "plays", "0"], [[1, 1]], "plays in the saved state is .* it must be a list of 4"),
        ("bandit", ["state", "arm", "0"], [9, 0], "the index of an arm in the saved state is 9"),
        ("bandit", ["state", "arm", "one"], [0, 0], "a key of arm in the saved state is 'one'"),
        ("bandit", ["cost"], None, "the cost table is None; it must be a list of rows"),
    ],
)
def test_what_is_wrong_is_named(kind, place, value, reason):
    data = saved(kind)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match=reason):
        policy_from_dict(data)
