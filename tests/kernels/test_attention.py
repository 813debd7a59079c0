"""Uniform-decode attention against a loop over queries in float64, the bits of its rows, and what it must not read."""

import math
from importlib.util import find_spec

import pytest
import torch
from attention_cases import assert_close, attend, call, world

from stepgraph.kernels.attention import (
    uniform_decode_attention,
    uniform_decode_attention_cpu,
    uniform_decode_attention_reference,
)
from stepgraph.kernels.attention.cpu import MAX_ROWWISE_QUERY
from stepgraph.kernels.registry import implementation

IMPLEMENTATIONS = {"reference": uniform_decode_attention_reference, "cpu": uniform_decode_attention_cpu}
if find_spec("numba"):
    IMPLEMENTATIONS["numba"] = implementation("uniform_decode_attention", "numba")
each = pytest.mark.parametrize("name", IMPLEMENTATIONS)
NAN = math.nan


@each
class TestAgainstTheLoop:
    """Case 37."""

    @pytest.mark.parametrize("groups", [1, 2, 4, 5, 8, 16, 24])
    def test_gqa_ratios(self, name, groups):
        for kv_heads in (1, 2):
            inputs = world([3, 9, 17], 3, heads=groups * kv_heads, kv_heads=kv_heads)
            assert_close(IMPLEMENTATIONS[name], inputs)

    @pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_head_dims(self, name, head_dim, dtype):
        assert_close(IMPLEMENTATIONS[name], world([5, 33], 2, head_dim=head_dim, dtype=dtype, block_size=16))

    @pytest.mark.parametrize("query_len", [*range(1, 10), 16, 17, 21])
    def test_query_lengths(self, name, query_len):
        lengths = [query_len, query_len + 1, 15, 16, 17, 40]
        assert_close(IMPLEMENTATIONS[name], world([max(n, query_len) for n in lengths], query_len, heads=2, kv_heads=1))

    @pytest.mark.parametrize("block_size", [1, 3, 16, 32, 128])
    def test_block_sizes(self, name, block_size):
        assert_close(IMPLEMENTATIONS[name], world([3, 15, 16, 17, 300], 3, heads=2, kv_heads=1, block_size=block_size))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("query_len", [2, 20])
    @pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 1.5), (5, 1.5)])
    def test_dtypes_windows_and_softcaps(self, name, dtype, query_len, window, softcap):
        inputs = world([20, 37, 41], query_len, dtype=dtype)
        assert_close(IMPLEMENTATIONS[name], inputs, window=window, softcap=softcap)

    @pytest.mark.parametrize("window", [1, 2, 4, 100])
    @pytest.mark.parametrize("query_len", [1, 4, 18])
    def test_windows_over_many_lengths(self, name, window, query_len):
        """Case 38."""
        lengths = list(range(3, 71, 9))
        assert_close(IMPLEMENTATIONS[name], world(lengths, query_len, heads=2, kv_heads=1, head_dim=4), window=window)

    @pytest.mark.parametrize("query_len", [1, 3, 9, 18])
    def test_empty_rows_and_negative_positions(self, name, query_len):
        inputs = world([0, 1, 2, 5, 17, 20], query_len)
        for window in (0, 2):
            assert_close(IMPLEMENTATIONS[name], inputs, window=window)
        out = call(IMPLEMENTATIONS[name], inputs)
        assert (out[0] == 0).all()
        for row, length in enumerate(inputs["seq_lens"].tolist()):
            assert (out[row, : max(0, query_len - length)] == 0).all()
            assert length == 0 or (out[row, -1] != 0).all()

    @pytest.mark.parametrize("query_len", [1, 3, 40])
    def test_rows_that_hold_nothing_are_zero(self, name, query_len):
        """A length below 0, as one that an offset took there, and a table without a block."""
        inputs = world([5, 9], query_len)
        below = inputs | {"seq_lens": torch.tensor([-1, -30])}
        tableless = inputs | {"block_table": inputs["block_table"][:, :0]}
        for empty in (below, tableless):
            assert (call(IMPLEMENTATIONS[name], empty) == 0).all()

    @pytest.mark.parametrize("query_len", [1, 3, 18])
    @pytest.mark.parametrize("window", [0, 3, 6])
    def test_lengths_beyond_the_block_table(self, name, query_len, window):
        """Steps near max_len: positions beyond the table's capacity hold nothing; a window that lies there is empty."""
        inputs = world([7, 8, 9, 10, 14, 30], query_len, blocks=2)
        assert_close(IMPLEMENTATIONS[name], inputs, window=window)

    def test_scale_is_applied(self, name):
        assert_close(IMPLEMENTATIONS[name], world([9, 12], 2), scale=0.9)


@pytest.mark.parametrize(("query_len", "dtype"), [(3, torch.float32), (3, torch.float64), (40, torch.bfloat16)])
def test_the_op_is_the_fastest_implementation_that_there_is(query_len, dtype):
    inputs = world([3, 9, 50], query_len, dtype=dtype)
    best = list(IMPLEMENTATIONS.values())[-1]
    assert torch.equal(call(uniform_decode_attention, inputs), call(best, inputs))


def poisoned(inputs, query_len) -> dict:
    """The same inputs with NaN wherever no query of a row may look, the null block and foreign table entries included."""
    block_size = inputs["k_cache"].shape[1]
    window = inputs["window"]
    allowed = torch.zeros(inputs["k_cache"].shape[:2], dtype=torch.bool)
    for row, length in enumerate(inputs["seq_lens"].tolist()):
        first = max(0, length - query_len - window + 1) if window else 0
        for position in range(first, min(length, inputs["block_table"].shape[1] * block_size)):
            allowed[inputs["block_table"][row, position // block_size], position % block_size] = True
    table = inputs["block_table"].clone()
    for row, length in enumerate(inputs["seq_lens"].tolist()):
        table[row, -(-length // block_size) :] = 0
    caches = {name: torch.where(allowed[..., None, None], inputs[name], NAN) for name in ("k_cache", "v_cache")}
    assert caches["k_cache"].isnan().any()
    return inputs | caches | {"block_table": table}


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("query_len", [1, 4, 18])
@pytest.mark.parametrize("window", [0, 4])
def test_nan_where_no_query_may_look(name, dtype, query_len, window):
    """Case 13: the null block, unused lanes, unused table entries and what lies before the window change no bit."""
    inputs = world([0, 2, 5, 19, 22, 39, 50], query_len, dtype=dtype) | {"window": window}
    out = call(IMPLEMENTATIONS[name], inputs)
    assert out.isfinite().all()
    assert torch.equal(call(IMPLEMENTATIONS[name], poisoned(inputs, query_len)), out)


@each
def test_a_row_full_of_nan_stays_alone(name):
    inputs = world([9, 11, 6], 2)
    out = call(IMPLEMENTATIONS[name], inputs)
    inputs["q"][1] = NAN
    for cache in ("k_cache", "v_cache"):
        inputs[cache][inputs["block_table"][1]] = NAN
    bad = call(IMPLEMENTATIONS[name], inputs)
    assert bad[1].isnan().all()
    assert torch.equal(bad[[0, 2]], out[[0, 2]])


SHAPES = [(4, 2, 32), (5, 1, 64), (6, 3, 80), (8, 8, 12), (1, 1, 33), (3, 3, 10), (3, 1, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_a_query_row_has_the_bits_of_a_query_alone(dtype, heads, kv_heads, head_dim):
    """Case 40, on the CPU: for any Q up to 16, any batch and any padding. Odd head dims put rows at odd addresses."""
    for query_len in (2, 5, MAX_ROWWISE_QUERY):
        for window, softcap in ((0, 0.0), (4, 0.0), (0, 2.0)):
            lengths = [query_len, 17, 0, 47]
            inputs = world(lengths, query_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
            inputs |= {"window": window, "softcap": softcap}
            out = call(uniform_decode_attention, inputs)
            for row, length in enumerate(lengths):
                for i in range(0, query_len, 1 if query_len < 9 else 4):
                    alone = call(
                        uniform_decode_attention,
                        inputs,
                        q=inputs["q"][row : row + 1, i : i + 1].clone(),
                        block_table=inputs["block_table"][row : row + 1],
                        seq_lens=torch.tensor([max(0, length - query_len + i + 1)]),
                    )
                    assert torch.equal(alone[0, 0], out[row, i]), (query_len, window, softcap, row, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_do_not_depend_on_batch_order_padding_or_block_placement(dtype):
    inputs = world([9, 30, 4, 17], 3, heads=3, kv_heads=3, head_dim=10, dtype=dtype)
    out = call(uniform_decode_attention, inputs)
    order = torch.tensor([3, 1, 0, 2])
    rows = {name: inputs[name][order] for name in ("q", "block_table", "seq_lens")}
    assert torch.equal(call(uniform_decode_attention, inputs, **rows), out[order])

    padded = {
        "q": torch.cat([torch.full_like(inputs["q"], NAN), inputs["q"]]),
        "block_table": torch.cat([torch.zeros_like(inputs["block_table"]), inputs["block_table"]]),
        "seq_lens": torch.cat([torch.zeros_like(inputs["seq_lens"]), inputs["seq_lens"]]),
    }
    padded_out = call(uniform_decode_attention, inputs, **padded)
    assert (padded_out[:4] == 0).all()
    assert torch.equal(padded_out[4:], out)

    move = torch.randperm(len(inputs["k_cache"]) - 1, generator=torch.Generator().manual_seed(1)) + 1
    moved = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    for name in moved:
        moved[name][move] = inputs[name][1:]
    assert torch.equal(call(uniform_decode_attention, inputs, **moved, block_table=move[inputs["block_table"] - 1]), out)

    wider = torch.cat([inputs["block_table"], torch.zeros(4, 5, dtype=torch.int64)], 1)
    assert torch.equal(call(uniform_decode_attention, inputs, block_table=wider), out)


@each
def test_inputs_are_left_alone(name):
    inputs = world([0, 3, 9], 3)
    before = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    call(IMPLEMENTATIONS[name], inputs)
    for key, value in before.items():
        assert torch.equal(inputs[key], value), key


@each
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_value_that_is_not_finite_spoils_the_queries_that_see_it_and_no_other(name, bad):
    """A draft that overflows is rejected; the rows before it decide that, and must not be lost with it."""
    inputs = world([12, 9], 4)
    out = call(IMPLEMENTATIONS[name], inputs)
    inputs["v_cache"][inputs["block_table"][0, 10 // 4], 10 % 4, 1, 3] = bad  # row 0's third query, in one KV head and column
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[0, 2:, 2:, 3] = True
    after = call(IMPLEMENTATIONS[name], inputs)
    assert torch.equal(~after.isfinite(), spoilt)
    assert torch.equal(after[~spoilt], out[~spoilt])


def fp8(inputs, scales) -> tuple[dict, dict]:
    """The same inputs with an fp8 cache, and with the float64 numbers that such a cache and its scales stand for."""
    stored = {name: inputs[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    meant = {name: cache.double() * scales[i].double()[:, None] for i, (name, cache) in enumerate(stored.items())}
    return inputs | stored, inputs | meant


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("query_len", "window"), [(1, 0), (4, 3), (40, 0)])
def test_fp8_cache_against_float64(name, dtype, query_len, window):
    scales = torch.tensor([[0.5, 2.0], [0.25, 0.011]])
    stored, meant = fp8(world([0, 7, 41, 60], query_len, dtype=dtype), scales)
    out = call(IMPLEMENTATIONS[name], stored, window=window, kv_scales=scales)
    expected, bound = call(attend, meant, window=window)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    allowed = 16 * torch.finfo(work).eps * bound + torch.finfo(dtype).eps * expected.abs()
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= allowed).all()


@each
def test_without_blocks_nothing_is_seen(name):
    inputs = world([3, 2], 2, dtype=torch.float32)
    empty = {"k_cache": inputs["k_cache"][:0], "v_cache": inputs["v_cache"][:0], "block_table": inputs["block_table"][:, :0]}
    torch.full_like(inputs["q"], NAN)  # its memory is given out next
    assert not call(IMPLEMENTATIONS[name], inputs, **empty).any()


@pytest.mark.parametrize("block", [-1, 19, 2**40])
def test_a_block_that_the_cache_does_not_have_is_named(block):
    """−1 would read the last block, which is another request's."""
    inputs = world([12, 9], 2, blocks=9)
    inputs["block_table"][1, 2] = block
    with pytest.raises(ValueError, match=f"block_table has {block}; allowed are blocks 0 to 18"):
        call(uniform_decode_attention, inputs)
