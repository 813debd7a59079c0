"""Commit of a step: against a loop over requests, and the limits and stops one by one."""

import copy

import pytest
import torch

from stepgraph.kernels.advance import LENGTH, RESULT_HEAD, RUNNING, STOPPED, advance

WRITTEN = ("seq_len", "last_token", "history", "finished", "steps", "drafted_at", "accepted_at", "repaired_total", "results")
EOS = 99


def new_state(num_slots: int, max_len: int = 16, k_max: int = 5, stop_ids: int = 3) -> dict[str, torch.Tensor]:
    """State whose every cell holds a number of its own, so that a stray write shows; the last slot is the null slot."""
    rows = num_slots + 1

    def numbers(start: int, *shape: int) -> torch.Tensor:
        return torch.arange(start, start + torch.Size(shape).numel()).view(shape)

    return {
        "seq_len": torch.full((rows,), 3),
        "last_token": numbers(1000, rows),
        "history": numbers(2000, rows, max_len),
        "finished": torch.zeros(rows, dtype=torch.int64),
        "steps": numbers(100, rows),
        "drafted_at": numbers(300, rows, k_max),
        "accepted_at": numbers(600, rows, k_max),
        "repaired_total": numbers(900, rows),
        "results": numbers(3000, 8, RESULT_HEAD + k_max + 1),
        "stop_ids": torch.full((rows, stop_ids), -1),
        "limit": torch.full((rows,), max_len),
    }


def commit(state, slots, emitted, *, accepted=None, num_drafts=None, live=None) -> None:
    """`emitted`: one list per row, padded here; `accepted` is all but the last token and every draft exists unless said."""
    width = max(len(tokens) for tokens in emitted)
    accepted = [len(tokens) - 1 for tokens in emitted] if accepted is None else accepted
    advance(
        torch.tensor(slots),
        torch.tensor([True] * len(slots) if live is None else live),
        torch.tensor([tokens + [-1] * (width - len(tokens)) for tokens in emitted]),
        torch.tensor(accepted),
        torch.tensor([width - 1] * len(slots) if num_drafts is None else num_drafts),
        torch.tensor([slot + 1 for slot in slots]),
        *(state[name] for name in WRITTEN),
        state["stop_ids"],
        state["limit"],
    )


def slow_commit(state, slots, emitted, *, accepted, num_drafts, live) -> None:
    """What `advance` means, token by token."""
    width = max(len(tokens) for tokens in emitted)
    for row, (slot, tokens, a, drafts, is_live) in enumerate(zip(slots, emitted, accepted, num_drafts, live, strict=True)):
        if not is_live:
            state["results"][row, : RESULT_HEAD + width] = -1
            continue
        outcome, count = RUNNING, 0
        stops = [s for s in state["stop_ids"][slot].tolist() if s >= 0]
        for token in tokens[: a + 1]:
            if state["seq_len"][slot] + 1 >= state["limit"][slot]:
                break
            state["seq_len"][slot] += 1
            state["history"][slot, state["seq_len"][slot]] = token
            state["last_token"][slot] = token
            count += 1
            if token in stops:
                outcome = STOPPED
                break
        if outcome == RUNNING and state["seq_len"][slot] + 1 >= state["limit"][slot]:
            outcome = LENGTH
        state["finished"][slot] = outcome
        state["steps"][slot] += 1
        state["drafted_at"][slot, :drafts] += 1
        state["accepted_at"][slot, : min(a, count)] += 1
        state["repaired_total"][slot] += slot + 1
        result = [int(state["seq_len"][slot]), outcome, drafts, min(a, count), slot + 1, *tokens[:count]]
        state["results"][row, : RESULT_HEAD + width] = torch.tensor(result + [-1] * (RESULT_HEAD + width - len(result)))


def assert_same(state, expected) -> None:
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("k", range(6))
def test_equals_the_loop(k):
    g = torch.Generator().manual_seed(k)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=g).tolist()

    for _ in range(60):
        state = new_state(num_slots=6, max_len=14)
        state["seq_len"] = torch.randint(0, 12, (7,), generator=g)
        state["limit"] = torch.minimum(state["seq_len"] + torch.randint(2, 9, (7,), generator=g), torch.tensor(14))
        state["stop_ids"] = torch.randint(-1, 12, (7, 3), generator=g)
        rows = torch.randint(1, 7, (1,), generator=g).item()
        live = [value > 0 for value in integers(0, 4, rows)]
        slots = torch.randperm(6, generator=g)[:rows].tolist()
        slots = [slot if is_live else 6 for slot, is_live in zip(slots, live, strict=True)]
        num_drafts = integers(0, k + 1, rows)
        accepted = [torch.randint(0, n + 1, (1,), generator=g).item() for n in num_drafts]
        emitted = [integers(0, 12, a + 1) + [-1] * (k - a) for a in accepted]
        expected = copy.deepcopy(state)
        step = {"accepted": accepted, "num_drafts": num_drafts, "live": live}
        slow_commit(expected, slots, emitted, **step)
        commit(state, slots, emitted, **step)
        assert_same(state, expected)


def test_an_ordinary_step():
    state = new_state(2)
    commit(state, [1], [[11, 12, 13, -1]], accepted=[2], num_drafts=[3])
    assert state["seq_len"].tolist() == [3, 6, 3]
    assert state["last_token"].tolist() == [1000, 13, 1002]
    assert state["history"][1].tolist() == [2016, 2017, 2018, 2019, 11, 12, 13, *range(2023, 2032)]
    assert state["finished"].tolist() == [RUNNING] * 3
    assert state["steps"].tolist() == [100, 102, 102]
    assert (state["drafted_at"][1] - torch.arange(305, 310)).tolist() == [1, 1, 1, 0, 0]
    assert (state["accepted_at"][1] - torch.arange(605, 610)).tolist() == [1, 1, 0, 0, 0]


def test_a_stop_inside_the_accepted_run():
    """Case 31: [d1, d2, EOS, d4, d5, bonus] -> 3 committed, "stop", that step counts 3."""
    state = new_state(1)
    before = copy.deepcopy(state)
    state["stop_ids"][0, 1] = EOS
    commit(state, [0], [[11, 12, EOS, 14, 15, 16]])
    assert state["seq_len"][0] == 6
    assert state["last_token"][0] == EOS
    assert state["finished"][0] == STOPPED
    assert state["history"][0, 4:7].tolist() == [11, 12, EOS]
    assert torch.equal(state["history"][0, 7:], before["history"][0, 7:])
    assert (state["drafted_at"] - before["drafted_at"])[0].tolist() == [1] * 5
    assert (state["accepted_at"] - before["accepted_at"])[0].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("accepted", range(6))
@pytest.mark.parametrize("offset", range(6))
def test_a_stop_at_each_offset(offset, accepted):
    """Offsets beyond the accepted run were refused: the stop id there is not in `emitted`."""
    state = new_state(1)
    before = copy.deepcopy(state)
    state["stop_ids"][0] = torch.tensor([-1, 98, EOS])
    tokens = [11, 12, 13, 14, 15, 16]
    tokens[offset] = EOS
    commit(state, [0], [tokens[: accepted + 1] + [-1] * (5 - accepted)], accepted=[accepted], num_drafts=[5])
    stopped = offset <= accepted
    count = offset + 1 if stopped else accepted + 1
    assert state["seq_len"][0] == 3 + count
    assert state["last_token"][0] == tokens[count - 1]
    assert state["finished"][0] == (STOPPED if stopped else RUNNING)
    assert (
        state["history"][0].tolist()
        == before["history"][0, :4].tolist() + tokens[:count] + before["history"][0, 4 + count :].tolist()
    )
    assert (state["accepted_at"] - before["accepted_at"])[0].sum() == min(accepted, count)
    assert (state["drafted_at"] - before["drafted_at"])[0].tolist() == [1] * 5


def test_the_first_of_several_stops_counts_and_padding_is_no_stop_id():
    state = new_state(2)
    state["stop_ids"][0] = torch.tensor([98, EOS, -1])
    commit(state, [0, 1], [[11, EOS, 98, EOS], [11, 12]], num_drafts=[3, 1])
    assert state["seq_len"].tolist() == [5, 5, 3]
    assert state["last_token"][:2].tolist() == [EOS, 12]
    assert state["finished"][:2].tolist() == [STOPPED, RUNNING]


def test_stop_ids_belong_to_their_request():
    state = new_state(2)
    state["stop_ids"][0, 0] = 11
    state["stop_ids"][1, 0] = 12
    commit(state, [1, 0], [[11, 12, 13], [12, 13, 11]])
    assert state["seq_len"].tolist() == [6, 5, 3]
    assert state["finished"].tolist() == [STOPPED, STOPPED, RUNNING]


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("new_tokens", range(1, 7))
def test_max_new_tokens(k, new_tokens):
    """Case 32: exactly n tokens come out however many a step could emit."""
    state = new_state(1, max_len=16)
    before = copy.deepcopy(state)
    state["limit"][0] = 4 + new_tokens
    text = list(range(10, 30))
    steps = 0
    while state["finished"][0] == RUNNING:
        done = int(state["seq_len"][0]) - 3
        commit(state, [0], [text[done : done + k + 1]])
        steps += 1
    assert steps == -(-new_tokens // (k + 1))
    assert state["finished"][0] == LENGTH
    assert state["seq_len"][0] == 3 + new_tokens
    assert state["last_token"][0] == text[new_tokens - 1]
    assert state["history"][0, 4 : 4 + new_tokens].tolist() == text[:new_tokens]
    assert torch.equal(state["history"][0, 4 + new_tokens :], before["history"][0, 4 + new_tokens :])


@pytest.mark.parametrize("room", range(1, 8))
def test_room(room):
    """Case 33 for each room: at most that many are committed, and nothing is written at or beyond the limit."""
    state = new_state(2, max_len=20)
    state["limit"][:] = 16
    state["seq_len"][:] = 15 - room  # 16 − room tokens are present
    before = copy.deepcopy(state)
    commit(state, [0], [[31, 32, 33, 34, 35, 36]])
    count = min(room, 6)
    assert state["seq_len"][0] == 15 - room + count
    assert state["last_token"][0] == 30 + count
    assert state["finished"][0] == (LENGTH if room <= 6 else RUNNING)
    assert state["history"][0, 16 - room : 16 - room + count].tolist() == [31, 32, 33, 34, 35, 36][:count]
    state["history"][0, 16 - room : 16 - room + count] = before["history"][0, 16 - room : 16 - room + count]
    assert torch.equal(state["history"], before["history"])
    assert (state["accepted_at"] - before["accepted_at"])[0].sum() == min(count, 5)


def test_a_full_history():
    """Case 33: max_len 16, 14 present, k = 5, and the buffer ends there too."""
    state = new_state(1, max_len=16)
    state["seq_len"][0] = 13
    before = copy.deepcopy(state)
    commit(state, [0], [[31, 32, 33, 34, 35, 36]])
    assert state["seq_len"][0] == 15
    assert state["finished"][0] == LENGTH
    assert state["history"][0].tolist() == [*before["history"][0, :14].tolist(), 31, 32]
    assert torch.equal(state["history"][1], before["history"][1])


@pytest.mark.parametrize("room", [0, -1])
def test_without_room_nothing_is_committed(room):
    state = new_state(1)
    before = copy.deepcopy(state)
    state["limit"][0] = before["limit"][0] = 4 + room
    commit(state, [0], [[31, 32]])
    for name in ("seq_len", "last_token", "history", "accepted_at"):
        assert torch.equal(state[name], before[name]), name
    assert state["finished"][0] == LENGTH


@pytest.mark.parametrize(("room", "outcome", "count"), [(3, STOPPED, 3), (2, LENGTH, 2), (4, STOPPED, 3)])
def test_a_stop_at_the_limit_is_a_stop_and_one_beyond_it_is_not(room, outcome, count):
    state = new_state(1)
    state["stop_ids"][0, 0] = EOS
    state["limit"][0] = 4 + room
    commit(state, [0], [[11, 12, EOS, 14]])
    assert state["finished"][0] == outcome
    assert state["seq_len"][0] == 3 + count


@pytest.mark.parametrize("padding", [[4], [4, 4, 4], [4] * 8])
def test_padding_rows_change_nothing(padding):
    """Case 12: alone, several of them, with contents that would stop, overflow and count if they were live."""
    state = new_state(4, max_len=16)
    state["stop_ids"][4, 0] = EOS
    state["limit"][4] = 3
    state["finished"][4] = STOPPED
    rows = len(padding)
    before = copy.deepcopy(state)
    before["results"][:rows, : RESULT_HEAD + 4] = -1  # all that the host learns is that there was nothing
    commit(state, padding, [[EOS, 10**9, -7, 2**62]] * rows, num_drafts=[3] * rows, live=[False] * rows)
    assert_same(state, before)


def test_padding_rows_do_not_disturb_live_ones():
    """Live rows between padding rows end like live rows alone; the null slot keeps its bytes."""
    alone, padded = new_state(4), new_state(4)
    null_before = {name: padded[name][4].clone() for name in WRITTEN if name != "results"}
    commit(alone, [2, 0], [[11, 12, 13, 14], [21, -1, -1, -1]], accepted=[3, 0], num_drafts=[3, 2])
    commit(
        padded,
        [4, 2, 4, 4, 0, 4],
        [[7] * 4, [11, 12, 13, 14], [8] * 4, [9] * 4, [21, -1, -1, -1], [6] * 4],
        accepted=[3, 3, 0, 1, 0, 2],
        num_drafts=[3, 3, 3, 3, 2, 3],
        live=[False, True, False, False, True, False],
    )
    assert torch.equal(padded["results"][[1, 4], : RESULT_HEAD + 4], alone["results"][:2, : RESULT_HEAD + 4])
    del padded["results"], alone["results"]
    assert_same(padded, alone)
    for name, value in null_before.items():
        assert torch.equal(padded[name][4], value), name


def test_counters_by_position_over_changing_k():
    """Case 43: k = 3 all accepted, then k = 1 accepted: counts [2, 1, 1] of both kinds."""
    state = new_state(1)
    before = copy.deepcopy(state)
    commit(state, [0], [[11, 12, 13, 14]])
    commit(state, [0], [[15, 16]])
    commit(state, [0], [[17]])
    for name in ("drafted_at", "accepted_at"):
        assert (state[name] - before[name])[0].tolist() == [2, 1, 1, 0, 0]
    assert state["steps"][0] == 103


def test_missing_drafts_are_not_counted():
    """Case 11: rows padded with "no draft"."""
    state = new_state(3)
    before = copy.deepcopy(state)
    commit(state, [0, 1, 2], [[11, -1, -1], [11, 12, -1], [11, -1, -1]], accepted=[0, 1, 0], num_drafts=[0, 1, 2])
    assert (state["drafted_at"] - before["drafted_at"])[:3, :3].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert (state["accepted_at"] - before["accepted_at"])[:3, :3].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
