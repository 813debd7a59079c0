"""Uniform-decode attention under the interpreter. Case numbers are those of the project's list of cases."""

from dataclasses import replace

import pytest
import torch

from stepgraph.kernels.attention.launcher import (
    AttentionConfig,
    scratch_size,
    uniform_decode_attention_triton,
)
from stepgraph.kernels.attention.reference import uniform_decode_attention_reference
from stepgraph.kernels.attention.work import build_attention_work_reference, work_capacity, work_size
from stepgraph.kernels.attention.work_triton import build_attention_work_triton
from stepgraph.kernels.testing import (
    CANARY,
    assert_kernel_close,
    assert_same_bits,
    guarded_allocations,
    paged_case,
)

# Small splits, so that short rows have several.
SMALL = AttentionConfig(rows=16, tile_kv=16, num_warps=4, kv_buffers=2, occupancy=2, split=32)


def run(case, **options):
    with guarded_allocations():
        return uniform_decode_attention_triton(*case.args, **options)


def check(case, **options):
    out = run(case, **options)
    assert_kernel_close(out, uniform_decode_attention_reference, *case.args)
    return out


# Case 37, each value of each axis at least once: (group, head_dim, query_len, length, block_size, dtype).
CURATED = {
    "smollm2": (3, 64, 4, 17, 16, torch.float32),
    "llama-1b": (4, 64, 1, 300, 16, torch.float16),
    "llama-8b": (4, 128, 4, 300, 16, torch.float16),
    "phi-2, head 80": (1, 80, 3, 16, 16, torch.float16),
    "head 80 in float32": (2, 80, 9, 15, 32, torch.float32),
    "qwen2.5-7b, two query tiles": (7, 128, 9, 17, 128, torch.float16),
    "qwen3-14b": (5, 128, 2, 300, 32, torch.float16),
    "llama-70b": (8, 128, 5, 300, 128, torch.float16),
    "gemma, head 256": (2, 256, 2, 17, 16, torch.float16),
    "group 16": (16, 32, 7, 300, 16, torch.float32),
    "group 24": (24, 64, 6, 16, 32, torch.float16),
    "multi-query": (32, 32, 8, 15, 16, torch.float16),
    "query as long as the row": (4, 32, 8, 8, 16, torch.float32),
    "query longer than the row": (4, 32, 8, 5, 16, torch.float32),
}


@pytest.mark.parametrize("name", CURATED)
def test_matches_float64(name):
    group, head_dim, query_len, length, block_size, dtype = CURATED[name]
    check(
        paged_case(
            [length, 1],
            query_len=query_len,
            group=group,
            kv_heads=1,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("length", [3, 31, 32, 33, 64, 70])
def test_sliding_window_with_many_splits(length, whole_rows):  # case 38
    case = paged_case([length, 70], query_len=3, head_dim=32, window=4, kv_heads=1)
    check(case, config=SMALL, whole_rows=whole_rows)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(softcap):
    check(paged_case([40, 17], query_len=2, head_dim=32, softcap=softcap), config=SMALL)


def test_long_row_over_default_splits():
    check(paged_case([1100, 513], query_len=2, kv_heads=1, head_dim=64, block_size=128, dtype=torch.float16))


def test_empty_rows_are_zero():  # case 13
    out = run(paged_case([0, 33, 0], query_len=2, head_dim=32), config=SMALL)
    assert_same_bits(out[0], torch.zeros_like(out[0]))
    assert_same_bits(out[2], torch.zeros_like(out[2]))
    assert out[1].isfinite().all()


def test_nan_where_no_row_reads_stays_there():  # case 13
    case = paged_case([40, 17], query_len=2, head_dim=32)
    clean = replace(case, k_cache=case.k_cache.nan_to_num(3.0), v_cache=case.v_cache.nan_to_num(-7.0))
    assert case.k_cache[0].isnan().all()
    assert_same_bits(run(case, config=SMALL), run(clean, config=SMALL))


@pytest.mark.usefixtures("row_invariant_dot")
def test_row_has_the_bits_of_a_one_token_query():  # case 40
    case = paged_case([66, 33], query_len=4, head_dim=32, kv_heads=1)  # both cross the end of a split
    whole = run(case, config=SMALL)
    for row, length in enumerate((66, 33)):
        for i in range(4):
            one = replace(
                case,
                q=case.q[row : row + 1, i : i + 1],
                block_table=case.block_table[row : row + 1],
                seq_lens=torch.tensor([length - 3 + i]),
            )
            assert_same_bits(run(one, config=SMALL)[0, 0], whole[row, i])


@pytest.mark.usefixtures("row_invariant_dot")
@pytest.mark.parametrize("window", [0, 40])
def test_bits_do_not_depend_on_batch_padding_or_neighbours(window):
    case = paged_case([70, 33, 0, 96], query_len=3, head_dim=32, window=window)
    whole = run(case, config=SMALL)
    alone = replace(case, q=case.q[1:2], block_table=case.block_table[1:2], seq_lens=case.seq_lens[1:2])
    assert_same_bits(run(alone, config=SMALL)[0], whole[1])
    order = torch.tensor([3, 0, 1, 2])
    moved = replace(case, q=case.q[order], block_table=case.block_table[order], seq_lens=case.seq_lens[order])
    assert_same_bits(run(moved, config=SMALL), whole[order])


@pytest.mark.usefixtures("row_invariant_dot")
@pytest.mark.parametrize("window", [0, 20])
def test_whole_rows_have_the_bits_of_split_rows(window):
    case = paged_case([100, 33, 0], query_len=3, head_dim=32, window=window)
    assert_same_bits(run(case, config=SMALL, whole_rows=True), run(case, config=SMALL, whole_rows=False))


@pytest.mark.usefixtures("row_invariant_dot")
def test_prefill_chunk_has_the_bits_of_decode():
    case = paged_case([70], query_len=20, head_dim=32, kv_heads=1)
    chunk = run(case, config=SMALL)
    tail = replace(case, q=case.q[:, 17:])
    assert_same_bits(run(tail, config=SMALL)[0], chunk[0, 17:])


def test_strided_cache_views_and_int32_indices():
    case = paged_case([40, 17], query_len=2, head_dim=32, index_dtype=torch.int32)
    interleaved = torch.stack([case.k_cache, case.v_cache], dim=1)
    views = replace(case, k_cache=interleaved[:, 0], v_cache=interleaved[:, 1])
    assert_same_bits(run(views, config=SMALL), run(case, config=SMALL))


def spaced(tensor):
    """The same numbers, none next to another."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("whole_rows", [False, True])
def test_strided_lengths_tables_and_scales(whole_rows):
    case = paged_case([40, 17], query_len=2, head_dim=32)
    caches = {name: getattr(case, name).nan_to_num().to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    case, scales = replace(case, **caches), torch.tensor([[0.5, 2.0], [1.5, 0.75]])
    options = {"config": SMALL, "whole_rows": whole_rows}
    strided = replace(case, block_table=spaced(case.block_table), seq_lens=spaced(case.seq_lens), q=spaced(case.q))
    expected = run(case, kv_scales=scales, **options)
    assert_same_bits(run(strided, kv_scales=spaced(scales), **options), expected)
    wider = replace(case, block_table=torch.cat([case.block_table, case.block_table + 99], 1)[:, : case.block_table.shape[1]])
    assert_same_bits(run(wider, kv_scales=scales, **options), expected)


def test_fp8_cache():
    case = paged_case([40, 17], query_len=2, head_dim=32)
    scales = torch.tensor([[0.5, 2.0], [1.5, 0.75]])
    k_cache, v_cache = (cache.nan_to_num().to(torch.float8_e4m3fn) for cache in (case.k_cache, case.v_cache))
    fp8 = replace(case, k_cache=k_cache, v_cache=v_cache)
    wide = replace(case, k_cache=k_cache.float() * scales[0][:, None], v_cache=v_cache.float() * scales[1][:, None])
    out = run(fp8, config=SMALL, kv_scales=scales)
    assert_kernel_close(out, uniform_decode_attention_reference, *wide.args)
    assert_same_bits(
        uniform_decode_attention_reference(*fp8.args, kv_scales=scales), uniform_decode_attention_reference(*wide.args)
    )
    with pytest.raises(ValueError, match="kv_scales"):
        run(fp8, config=SMALL)


class TestScratch:  # case 39
    case = staticmethod(lambda: paged_case([70, 33], query_len=3, head_dim=32))

    def needed(self, case):
        tokens = case.block_table.shape[1] * 16
        capacity = work_capacity(2, tokens, case.k_cache.shape[0] * 16, SMALL.split)
        return scratch_size(capacity, 3, case.q.shape[2], 32)

    def test_too_small_raises(self):
        case = self.case()
        with pytest.raises(ValueError, match="scratch"):
            run(case, config=SMALL, scratch=torch.empty(self.needed(case) - 1))
        with pytest.raises(ValueError, match="scratch must be contiguous"):
            run(case, config=SMALL, scratch=spaced(torch.empty(self.needed(case))))

    def test_caller_scratch_is_enough_and_nothing_lies_beyond(self):
        case = self.case()
        buffer = torch.full((self.needed(case) + 200,), CANARY)
        out = run(case, config=SMALL, scratch=buffer[100:-100])
        assert (buffer[:100] == CANARY).all()
        assert (buffer[-100:] == CANARY).all()
        assert_same_bits(out, run(case, config=SMALL))

    def test_shared_list_gives_the_same_bits(self):
        case = self.case()
        tokens, pool = case.block_table.shape[1] * 16, case.k_cache.shape[0] * 16
        work = build_attention_work_triton(case.seq_lens, 3, 0, tokens, pool, SMALL.split)
        for listed in (work, spaced(work)):
            assert_same_bits(run(case, config=SMALL, work=listed), run(case, config=SMALL))

    def test_list_of_another_batch_raises(self):
        with pytest.raises(ValueError, match="work list"):
            run(self.case(), config=SMALL, work=torch.zeros(9, dtype=torch.int32))

    def test_rows_beyond_the_capacity_are_nan_and_nothing_is_overwritten(self):
        # Rows that share blocks can ask for more entries than the pool has room for.
        case = paged_case([96], query_len=2, head_dim=32)
        shared = replace(
            case,
            q=case.q.repeat(5, 1, 1, 1),
            block_table=case.block_table.repeat(5, 1),
            seq_lens=case.seq_lens.repeat(5),
        )
        assert work_capacity(5, 96, case.k_cache.shape[0] * 16, SMALL.split) == 9  # 3 rows of 3 entries
        out = run(shared, config=SMALL)
        expected = run(case, config=SMALL)[0]
        for row in range(3):
            assert_same_bits(out[row], expected)
        assert out[3:].isnan().all()


@pytest.mark.parametrize("window", [0, 5, 100])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_work_list_matches_reference(window, index_dtype):
    lengths = torch.tensor([0, 5, 1000, 1, 600, 64, 65, 5000], dtype=index_dtype)  # 5000 is cut at the table
    args = (lengths, 3, window, 1024, 100_000, 64)
    expected = build_attention_work_reference(*args)
    with guarded_allocations():
        actual = build_attention_work_triton(*args)
    assert actual.shape == expected.shape == (work_size(8, work_capacity(8, 1024, 100_000, 64)),)
    live = 2 + 8 + 2 * int(expected[0])
    assert expected[0] == expected[1] > 0
    assert torch.equal(actual[:live], expected[:live])


def test_work_list_overflow_matches_reference():
    args = (torch.tensor([640, 640, 64, 640]), 1, 0, 1024, 640, 64)  # 14 entries fit: rows 0 has 10, row 1 does not fit
    expected, actual = build_attention_work_reference(*args), build_attention_work_triton(*args)
    live = 2 + 4 + 2 * int(expected[0])
    assert expected[:6].tolist() == [10, 31, 0, -1, -1, -1]
    assert torch.equal(actual[:live], expected[:live])


def test_a_tile_too_small_for_the_group_is_refused():
    with pytest.raises(ValueError, match="query heads per KV head"):
        run(paged_case([5], group=24, kv_heads=1, head_dim=32), config=SMALL)
