"""Slots of `DecodeState`: written, forgotten, and found again when a buffer is another tensor."""

import pytest
import torch

from stepgraph.capture.state import LAWS, NUMBERS, DecodeState


def state_of(**sizes) -> DecodeState:
    return DecodeState(**{"num_slots": 3, "max_len": 16, "block_size": 4, "k_max": 2} | sizes)


def test_a_slot_holds_what_was_written_and_then_what_an_empty_one_does():
    state = state_of()
    empty = {name: buffer.clone() for name, buffer in state.named_buffers()}
    state.write_slot(1, range(10, 10 + len(NUMBERS)), (0.5, 0.25, 0.125))
    assert [int(getattr(state, name)[1]) for name in NUMBERS] == [*range(10, 10 + len(NUMBERS))]
    assert [float(getattr(state, name)[1]) for name in LAWS] == [0.5, 0.25, 0.125]
    state.clear_slot(1)
    assert all(torch.equal(buffer, empty[name]) for name, buffer in state.named_buffers())


@pytest.mark.parametrize("change", ["assigned", "moved"])
def test_writes_reach_buffers_that_are_other_tensors_now(change):
    state = state_of()
    state.write_slot(1, [7] * len(NUMBERS))
    if change == "assigned":
        state.seq_len = state.seq_len.clone()
    else:
        state.to(torch.device("cpu")).float()
    state.write_slot(1, [9] * len(NUMBERS))
    assert int(state.seq_len[1]) == 9
    state.clear_slot(1)
    assert int(state.seq_len[1]) == 0


def test_rows_are_padding_from_where_there_are_none():
    state = state_of()
    state.set_rows([2, 0, 1])
    state.pad_rows(2)
    assert state.slots.tolist() == [2, 0, -1]
    state.set_rows([1])
    assert state.slots.tolist() == [1, -1, -1]
    state.set_rows([])
    assert state.slots.tolist() == [-1, -1, -1]
    for wrong in ([0, 0], [3], [0, 1, 2, -1], [True]):
        with pytest.raises(ValueError, match="slots is"):
            state.set_rows(wrong)
    assert state.slots.tolist() == [-1, -1, -1]
