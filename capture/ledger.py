"""What the host knows of the requests that run, by slot, in NumPy arrays: a step of any batch is a few vector operations."""

from typing import NamedTuple

import numpy as np

from stepgraph.kernels.advance import RESULT_HEAD

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


class Ledger:
    """Progress of up to `num_slots` requests.

    Attributes:
        length: `[S]` tokens of the text so far, prompt included.
        held: `[S]` tokens that the request's KV blocks have room for.
    """

    def __init__(self, num_slots: int, max_len: int, k_max: int):
        self.length, self.held, self._prompt_len, self._steps, self._repaired = np.zeros((5, num_slots), np.int64)
        self._tokens = np.zeros((num_slots, max_len), np.int64)
        self._drafted_at, self._accepted_at = np.zeros((2, num_slots, k_max), np.int64)
        self._first_s, self._last_s = np.zeros((2, num_slots))
        self._columns = np.arange(k_max + 1)

    def open(self, slot: int, prompt_len: int) -> None:
        """A request takes the slot; nothing of the last one stays."""
        by_slot = (self.held, self._steps, self._repaired, self._drafted_at, self._accepted_at, self._first_s, self._last_s)
        for array in by_slot:
            array[slot] = 0
        self.length[slot] = self._prompt_len[slot] = prompt_len

    def answer_tokens(self, slot: int) -> int:
        return int(self.length[slot] - self._prompt_len[slot])

    def receive(self, slots: np.ndarray, results: np.ndarray, k: int, now_s: float) -> None:
        """Take in a step.

        Args:
            slots: `[B]`, each once.
            results: `[B, 5 + k + 1 or more]` int64, a row for each slot.
            k: of the step.
            now_s: when its results were read.
        """
        tokens = results[:, RESULT_HEAD : RESULT_HEAD + k + 1]
        there = tokens >= 0
        at = self.length[slots][:, None] + self._columns[: k + 1]
        rows = np.broadcast_to(slots[:, None], at.shape)
        self._tokens[rows[there], at[there]] = tokens[there]
        self.length[slots] += there.sum(1)
        self._steps[slots] += 1
        self._repaired[slots] += results[:, REPAIRED]
        self._first_s[slots] = np.where(self._first_s[slots] == 0, now_s, self._first_s[slots])
        self._last_s[slots] = now_s
        if k:
            columns = self._columns[:k]
            self._drafted_at[slots, :k] += columns < results[:, DRAFTED, None]
            self._accepted_at[slots, :k] += columns < results[:, ACCEPTED, None]

    def progress(self, slot: int) -> Progress:
        first_s, last_s = float(self._first_s[slot]), float(self._last_s[slot])
        return Progress(
            self._tokens[slot, self._prompt_len[slot] : self.length[slot]].tolist(), int(self._steps[slot]),
            self._drafted_at[slot].tolist(), self._accepted_at[slot].tolist(), first_s or None, last_s or None,
            int(self._repaired[slot]),
        )  # fmt: skip
