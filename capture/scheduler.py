"""Which requests hold memory and run: slots and KV blocks, on the host."""

from collections import deque

import numpy as np

from stepgraph.capture.blocks import BlockTables
from stepgraph.capture.ledger import Ledger, Progress, no_progress
from stepgraph.capture.request import Request, SamplingParams
from stepgraph.capture.state import DecodeState
from stepgraph.capture.transfer import integers, upload


class Scheduler:
    """Admits waiting requests in order of arrival and grows their block tables.

    A request is admitted when a slot is free and the blocks of its longest possible text can be reserved, so a running
    request never runs out of memory. It takes reserved blocks only as its text grows.
    """

    def __init__(self, state: DecodeState, num_blocks: int, block_size: int):
        self.state = state
        self.blocks = BlockTables(num_blocks, block_size, *state.block_table[:-1].shape)
        self.ledger = Ledger(state.num_slots, state.max_len, state.k_max)
        self.free_slots = list(range(state.num_slots - 1, -1, -1))
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []

    def most_blocks(self, request: Request) -> int:
        """Blocks of the longest text the request may reach; its last token never enters the cache."""
        return -(-(request.limit - 1) // self.blocks.block_size)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.running)

    def admit(self) -> None:
        """Give slots to waiting requests while there is room."""
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            if not self.blocks.reserve(self.free_slots[-1], self.most_blocks(request)):
                return
            request.slot = self.free_slots.pop()
            self.ledger.open(request.slot, len(request.prompt_ids))
            self._write_slot(request)
            self.waiting.popleft()
            self.prefilling.append(request)

    def grow(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Have blocks for the first `tokens[i]` tokens of the request in slot `slots[i]`, or as many as it can ever use. All
        that is new goes to the device at once.
        """
        fresh = self.blocks.grow(slots, tokens)
        if fresh.size:
            table = self.state.block_table
            table.view(-1).index_copy_(0, *integers(fresh, table.device))

    def progress(self, request: Request) -> Progress:
        """What a request has come to."""
        return no_progress(self.state.k_max) if request.slot < 0 else self.ledger.progress(request.slot)

    def release(self, request: Request) -> None:
        """Take a request out, wherever it is, and return what it holds."""
        for queue in (self.waiting, self.prefilling, self.running):
            if request in queue:
                queue.remove(request)
        if request.slot >= 0:
            self.blocks.release(request.slot)
            self.state.clear_slot(request.slot)
            self.free_slots.append(request.slot)
            request.slot = -1

    def _write_slot(self, request: Request) -> None:
        """What the slot holds is what an empty one does, so what is as there need not be written."""
        state, slot, params, prompt = self.state, request.slot, request.params, request.prompt_ids
        upload(state.history[slot, : len(prompt)], prompt)
        draft_limit = state.k_max if params.draft_limit is None else min(params.draft_limit, state.k_max)
        numbers = prompt[-1], len(prompt) - 1, request.limit, draft_limit, request.seed, int(request.verify), len(prompt)
        if params.temperature:
            state.write_slot(slot, numbers, (params.temperature, params.top_p, params.min_p))
            state.top_k[slot] = params.top_k
        else:
            state.write_slot(slot, numbers)
        if request.stop_ids:
            upload(state.stop_ids[slot, : len(request.stop_ids)], request.stop_ids)
        if request.rates:
            upload(state.rates[slot, : len(request.rates)], request.rates)
        if params.logprobs:
            state.wants_logprobs[slot] = True
        if params.transforms_logits:
            self._write_transforms(slot, params, len(prompt))

    def _write_transforms(self, slot: int, params: SamplingParams, prompt_len: int) -> None:
        state = self.state
        state.transformed[slot] = True
        state.min_len[slot] = prompt_len + params.min_tokens
        state.repetition[slot] = params.repetition_penalty
        state.frequency[slot] = params.frequency_penalty
        state.presence[slot] = params.presence_penalty
        if params.logit_bias:
            count = len(params.logit_bias)
            upload(state.bias_ids[slot, :count], list(params.logit_bias))
            upload(state.bias_values[slot, :count], [float(value) for value in params.logit_bias.values()])
