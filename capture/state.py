"""`DecodeState`: every tensor of the running requests that outlives a step, allocated once, read and written in place."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stepgraph.capture.transfer import Download, upload, upload_source
from stepgraph.kernels.advance import RESULT_HEAD, RUNNING
from stepgraph.model.drafters.base import StepRows

MAX_STOP_IDS = 8
MAX_LOGIT_BIAS = 128

# Buffers of one number a slot that every request sets, and those that say how it is drawn (greedy in an empty slot).
NUMBERS = ("last_token", "seq_len", "limit", "draft_limit", "seed", "verify", "prompt_len")
LAWS = ("temperature", "top_p", "min_p")

# What an empty slot holds where that is not 0.
EMPTY = {"slots": -1, "stop_ids": -1, "bias_ids": -1, "top_p": 1.0, "repetition": 1.0}


class DecodeState(nn.Module):
    """State of up to `num_slots` requests, by slot, plus one null slot that padding rows name.

    A request keeps its slot from start to end; a step finds its requests through `slots[row]`, so that nothing moves when
    the batch changes. Position p of a text holds `history[slot, p]`; `seq_len` tokens are in the KV cache, and `last_token`,
    at position `seq_len`, is the newest committed token and not in it yet. The history is also the output: it is only ever
    appended to, so the host may read it as late as it likes.

    Buffers (S = num_slots + 1): `slots [num_slots]` row → slot, −1 padding; `seq_len, last_token, finished, steps, limit,
    draft_limit, top_k, seed [S]` int64; `temperature, top_p, min_p [S]` float32; `history [S, max_len]`;
    `block_table [S, ceil(max_len / block_size)]`; `stop_ids [S, 8]`; `drafted_at, accepted_at [S, k_max]`.
    Verification: `verify [S]` a `Verify`, `rates [S, k_max]` float32 for synthetic acceptance. Transforms (see
    `stepgraph.kernels.transforms`): `transformed [S]` bool, `prompt_len, min_len [S]`, `repetition, frequency, presence [S]`
    float32, `bias_ids, bias_values [S, 128]`. Results on request: `wants_logprobs [S]` bool, `logprobs [S, max_len]` float32
    by position. `repaired [S]`: rows of logits that were not finite. `results [num_slots, 5 + k_max + 1]`: what the host reads
    after a step, by row (see `stepgraph.kernels.advance`).
    """

    def __init__(self, *, num_slots: int, max_len: int, block_size: int, k_max: int, device: str | torch.device = "cpu"):
        super().__init__()
        self.num_slots, self.max_len, self.k_max = num_slots, max_len, k_max
        rows = num_slots + 1

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def flags() -> Tensor:
            return torch.zeros(rows, dtype=torch.bool, device=device)

        tensors = {
            "slots": integers(num_slots),
            "seq_len": integers(rows),
            "last_token": integers(rows),
            "history": integers(rows, max_len),
            "block_table": integers(rows, -(-max_len // block_size)),
            "finished": integers(rows),
            "limit": integers(rows),
            "draft_limit": integers(rows),
            "stop_ids": integers(rows, MAX_STOP_IDS),
            "temperature": floats(rows),
            "top_k": integers(rows),
            "top_p": floats(rows),
            "min_p": floats(rows),
            "seed": integers(rows),
            "steps": integers(rows),
            "drafted_at": integers(rows, k_max),
            "accepted_at": integers(rows, k_max),
            "verify": integers(rows),
            "rates": floats(rows, k_max),
            "transformed": flags(),
            "prompt_len": integers(rows),
            "min_len": integers(rows),
            "repetition": floats(rows),
            "frequency": floats(rows),
            "presence": floats(rows),
            "bias_ids": integers(rows, MAX_LOGIT_BIAS),
            "bias_values": floats(rows, MAX_LOGIT_BIAS),
            "wants_logprobs": flags(),
            "logprobs": floats(rows, max_len),
            "repaired": integers(rows),
            "results": integers(num_slots, RESULT_HEAD + k_max + 1),
        }
        self._placed = np.empty(0, np.int64)  # what `slots` holds; all after it is padding
        self._by_slot = tuple(name for name in tensors if name not in ("slots", "results"))
        self._views: dict[tuple[int, tuple[str, ...]], list[Tensor]] = {}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.fill_(EMPTY.get(name, 0)), persistent=False)

    def set_rows(self, slots: Sequence[int]) -> None:
        """Rows 0.. of the next steps run these slots, rows after them are padding, as is −1.

        Raises:
            ValueError: more rows than slots, a slot that does not exist, or one on two rows, whose writes would race.
        """
        live, last = [slot for slot in slots if slot != -1], self.num_slots - 1
        known = all(isinstance(slot, int) and not isinstance(slot, bool) and 0 <= slot <= last for slot in live)
        if not known or len(slots) > self.num_slots or len(set(live)) < len(live):
            raise ValueError(f"slots is {list(slots)}; allowed are up to {last + 1} of 0 to {last}, each once, and -1")
        self.place(np.array(slots, dtype=np.int64))

    def place(self, slots: np.ndarray) -> None:
        """`set_rows` for int64 slots that are known to be right; costs nothing when the array is that of the last call."""
        if slots is not self._placed:
            upload(self.slots[: len(slots)], slots)
            if len(slots) < len(self._placed):
                self.slots[len(slots) : len(self._placed)] = -1
            object.__setattr__(self, "_placed", slots)  # a module's own way looks through parameters and buffers first

    def pad_rows(self, batch: int) -> None:
        """Make padding of every row from `batch` on."""
        if batch < len(self._placed):
            self.place(self._placed[:batch])

    def rows(self, batch: int, k: int, drafter_positions: int | None) -> StepRows:
        """The first `batch` rows as a step sees them. Traced: fixed shapes, no host read.

        A row may have as many drafts as fit: with room for r more tokens at most r − 1 drafts are of use (one token always
        follows them), and the drafter's inputs must lie below its own largest position.
        """
        row_slots = self.slots[:batch]
        live = (row_slots >= 0) & (self.finished[row_slots] == RUNNING)
        slots = torch.where(live, row_slots, self.num_slots)  # the null slot: no tokens, no drafts, greedy
        seq_len = self.seq_len[slots]
        num_drafts = torch.minimum(self.draft_limit[slots], self.limit[slots] - 2 - seq_len).clamp(max=k)
        if drafter_positions is not None:
            num_drafts = torch.minimum(num_drafts, drafter_positions - seq_len)
        previous = self.history[slots, (seq_len - 1).clamp(min=0)]
        return StepRows(
            slots=slots,
            live=live,
            seq_len=seq_len,
            last_token=self.last_token[slots],
            previous_token=torch.where(seq_len > 0, previous, -1),
            num_drafts=num_drafts.clamp(min=0),
            block_table=self.block_table[slots],
            history=self.history,
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            seed=self.seed[slots],
        )

    def clear_slot(self, slot: int) -> None:
        """Forget the request of a slot: nothing of it may reach the next one."""
        torch._foreach_copy_(self._views_of(slot, self._by_slot), self._views_of(self.num_slots, self._by_slot))

    def write_slot(self, slot: int, numbers: Sequence[int], laws: Sequence[float] = ()) -> None:
        """Set the `NUMBERS` of a slot and, where there are any, its `LAWS`."""
        cells = self._views_of(slot, NUMBERS)
        sources = list(upload_source(numbers, torch.int64, self.slots.is_cuda).unbind())
        if laws:
            cells = cells + self._views_of(slot, LAWS)
            sources += upload_source(laws, torch.float32, self.slots.is_cuda).unbind()
        torch._foreach_copy_(cells, sources, non_blocking=True)

    def _views_of(self, slot: int, names: tuple[str, ...]) -> list[Tensor]:
        """What some buffers hold for a slot, as views that are made once."""
        if (slot, names) not in self._views:
            self._views[slot, names] = [getattr(self, name)[slot] for name in names]
        return self._views[slot, names]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Tensor):
            self._views.clear()  # a buffer is another one now

    def _apply(self, *args, **kwargs):
        self._views.clear()  # the buffers may move
        return super()._apply(*args, **kwargs)

    def step_results(self, batch: int) -> Download:
        """Start to fetch the results of the step that was launched last, `[batch, 5 + k_max + 1]`."""
        return Download(self.results[:batch])

    def tokens(self, slot: int, start: int, stop: int) -> list[int]:
        """Tokens of a request at positions `start .. stop - 1`."""
        return self.history[slot, start:stop].tolist()
