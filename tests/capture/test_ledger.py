"""What the host knows of running requests: a compiled loop against one request and one token at a time."""

import numpy as np
import pytest

from stepgraph.capture.ledger import ACCEPTED, DRAFTED, FINISHED, REPAIRED, SEQ_LEN, Ledger, no_progress
from stepgraph.kernels.advance import RESULT_HEAD

SLOTS, MAX_LEN, K_MAX = 5, 64, 4


def result_row(rng: np.random.Generator, length: int, k: int) -> tuple[np.ndarray, list[int]]:
    """A row as `advance` leaves it, and its tokens."""
    drafted = int(rng.integers(k + 1))
    accepted = int(rng.integers(drafted + 1))
    tokens = rng.integers(100, size=accepted + 1).tolist()
    row = np.full(RESULT_HEAD + K_MAX + 1, 77)  # columns after the step's own hold what an earlier step left
    row[RESULT_HEAD : RESULT_HEAD + k + 1] = tokens + [-1] * (k - accepted)
    row[[SEQ_LEN, FINISHED, DRAFTED, ACCEPTED, REPAIRED]] = length + accepted, 0, drafted, accepted, rng.integers(2)
    return row, tokens


@pytest.mark.parametrize("seed", range(5))
def test_steps_add_up(seed):
    rng = np.random.default_rng(seed)
    ledger, known = Ledger(SLOTS, MAX_LEN, K_MAX), {}
    for step in range(60):
        for slot in range(SLOTS):
            if slot not in known or ledger.length[slot] > MAX_LEN - K_MAX - 2:
                prompt = int(rng.integers(1, 9))
                ledger.open(slot, prompt)
                known[slot] = {"prompt": prompt, "tokens": [], "steps": 0, "drafted": [0] * K_MAX, "accepted": [0] * K_MAX,
                               "repaired": 0, "first": None, "last": None}  # fmt: skip
        k = int(rng.integers(K_MAX + 1))
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        rows = []
        for slot in slots.tolist():
            its = known[slot]
            row, tokens = result_row(rng, its["prompt"] + len(its["tokens"]), k)
            rows.append(row)
            its["tokens"] += tokens
            its["steps"] += 1
            its["repaired"] += int(row[REPAIRED])
            its["first"], its["last"] = its["first"] or step + 1.0, step + 1.0
            for name, count in (("drafted", row[DRAFTED]), ("accepted", row[ACCEPTED])):
                for position in range(count):
                    its[name][position] += 1
        ledger.receive(slots, np.array(rows), k, step + 1.0)
        for slot, its in known.items():
            assert ledger.length[slot] == its["prompt"] + len(its["tokens"])
            assert ledger.answer_tokens(slot) == len(its["tokens"])
            assert ledger.progress(slot) == (
                its["tokens"], its["steps"], its["drafted"], its["accepted"], its["first"], its["last"], its["repaired"]
            )  # fmt: skip


def test_a_row_without_tokens_adds_none():
    ledger = Ledger(2, 8, 2)
    ledger.open(1, 3)
    row = np.array([[3, 0, 0, 0, 0, -1, -1, -1]])
    ledger.receive(np.array([1]), row, 2, 1.0)
    assert ledger.progress(1)[:4] == ([], 1, [0, 0], [0, 0])
    assert ledger.length.tolist() == [0, 3]


def test_a_slot_forgets_and_a_request_without_one_has_nothing():
    ledger = Ledger(1, 8, 1)
    ledger.open(0, 2)
    ledger.receive(np.array([0]), np.array([[3, 0, 1, 1, 1, 5, 6]]), 1, 2.5)
    assert ledger.progress(0) == ([5, 6], 1, [1], [1], 2.5, 2.5, 1)
    ledger.open(0, 4)
    assert ledger.progress(0) == no_progress(1)
