"""What the host knows of the requests that run, by slot, in NumPy arrays that a compiled loop keeps up to date."""

from typing import NamedTuple

import numpy as np

from stepgraph.kernels.advance import RESULT_HEAD
from stepgraph.kernels.jit import compiled

# Columns of a step's results (see `stepgraph.kernels.advance`); tokens follow, −1 where there are none.
SEQ_LEN, FINISHED, DRAFTED, ACCEPTED, REPAIRED = range(RESULT_HEAD)


class Progress(NamedTuple):
    """What a request has come to: its answer, and counts of what became of its drafts."""

    token_ids: list[int]
    steps: int
    drafted_at: list[int]
    accepted_at: list[int]
    first_token_s: float | None
    last_token_s: float | None
    repaired: int


def no_progress(k_max: int) -> Progress:
    """Of a request that never had a slot."""
    return Progress([], 0, [0] * k_max, [0] * k_max, None, None, 0)


@compiled
def _take_in(slots, results, k, now_s, length, tokens, steps, repaired, drafted_at, accepted_at, first_s, last_s):
    for row in range(len(slots)):
        slot = slots[row]
        if slot < 0:
            continue
        for column in range(RESULT_HEAD, RESULT_HEAD + k + 1):
            if results[row, column] < 0:
                break
            tokens[slot, length[slot]] = results[row, column]
            length[slot] += 1
        steps[slot] += 1
        repaired[slot] += results[row, REPAIRED]
        if first_s[slot] == 0:
            first_s[slot] = now_s
        last_s[slot] = now_s
        for position in range(results[row, DRAFTED]):
            drafted_at[slot, position] += 1
        for position in range(results[row, ACCEPTED]):
            accepted_at[slot, position] += 1


class Ledger:
    """Progress of up to `num_slots` requests.

    Attributes:
        length: `[S]` int64, tokens of the text so far, prompt included.
    """

    def __init__(self, num_slots: int, max_len: int, k_max: int):
        self.length, self._prompt_len, self._steps, self._repaired = np.zeros((4, num_slots), np.int64)
        self._tokens = np.zeros((num_slots, max_len), np.int64)
        self._drafted_at, self._accepted_at = np.zeros((2, num_slots, k_max), np.int64)
        self._first_s, self._last_s = np.zeros((2, num_slots))

    def open(self, slot: int, prompt_len: int) -> None:
        """A request takes the slot; nothing of the last one stays."""
        by_slot = (self._steps, self._repaired, self._drafted_at, self._accepted_at, self._first_s, self._last_s)
        for array in by_slot:
            array[slot] = 0
        self.length[slot] = self._prompt_len[slot] = prompt_len

    def answer_tokens(self, slot: int) -> int:
        return int(self.length[slot] - self._prompt_len[slot])

    def receive(self, slots: np.ndarray, results: np.ndarray, k: int, now_s: float) -> None:
        """Take in a step.

        Args:
            slots: `[B]` int64, each once; −1 leaves the row out.
            results: `[B, 5 + k + 1 or more]` int64, a row for each slot.
            k: of the step.
            now_s: when its results were read.
        """
        _take_in(
            slots, results, k, now_s, self.length, self._tokens, self._steps, self._repaired, self._drafted_at,
            self._accepted_at, self._first_s, self._last_s,
        )  # fmt: skip

    def progress(self, slot: int) -> Progress:
        first_s, last_s = float(self._first_s[slot]), float(self._last_s[slot])
        return Progress(
            self._tokens[slot, self._prompt_len[slot] : self.length[slot]].tolist(), int(self._steps[slot]),
            self._drafted_at[slot].tolist(), self._accepted_at[slot].tolist(), first_s or None, last_s or None,
            int(self._repaired[slot]),
        )  # fmt: skip
