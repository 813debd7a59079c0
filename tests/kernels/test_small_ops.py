"""Norms, the gated activation, the linear layer, and RoPE with its KV write, against their formulas in float64."""

import math

import pytest
import torch

from stepgraph.kernels.activation import silu_mul
from stepgraph.kernels.linear import linear, linear_reference
from stepgraph.kernels.norm import add_rms_norm, rms_norm
from stepgraph.kernels.rope_kv import rope_kv_write

NAN = math.nan
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def normal(*shape, dtype=torch.float64, seed=0, scale=1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype)


def work_eps(dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def assert_within(out, expected, allowed) -> None:
    excess = ((out.double() - expected).abs() - allowed).max().item()
    assert excess <= 0, f"exceeds its bound by {excess}"


# --- norms -------------------------------------------------------------------------------------------------------------------


def rms_formula(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@every_dtype
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 33), (2, 1, 4, 64), (4, 1)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(dtype, shape, eps):
    x, weight = normal(*shape, dtype=dtype, scale=3.0), normal(shape[-1], dtype=dtype, seed=1)
    out = rms_norm(x, weight, eps)
    assert out.dtype == dtype
    expected = rms_formula(x, weight, eps)
    # Rounded twice to x's dtype: the normalised value, and its product with the weight.
    assert_within(
        out, expected, (8 * work_eps(dtype) + 1.5 * torch.finfo(dtype).eps) * expected.abs() + 1e-7 * (dtype == DTYPES[3])
    )


@every_dtype
def test_rms_norm_statistics_do_not_overflow(dtype):
    """A row of 300s has a square of 9e4, beyond float16; eps alone decides a row of zeros."""
    x = torch.full((2, 16), 300.0, dtype=dtype)
    x[1] = 0
    out = rms_norm(x, torch.full((16,), 2.0, dtype=dtype), 1e-6)
    torch.testing.assert_close(out[0], torch.full((16,), 2.0, dtype=dtype))
    assert (out[1] == 0).all()


@every_dtype
def test_add_rms_norm(dtype):
    x, residual, weight = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate([(3, 5, 33), (3, 5, 33), (33,)]))
    x_before, residual_before = x.clone(), residual.clone()
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, (x_before + residual_before))
    assert torch.equal(out, rms_norm(total, weight, 1e-5))
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


@every_dtype
@pytest.mark.parametrize("size", [33, 64])
def test_norm_rows_have_the_bits_of_a_row_alone(dtype, size):
    x, weight = normal(7, 4, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    whole, (added, _) = rms_norm(x, weight, 1e-6), add_rms_norm(x, x.flip(0), weight, 1e-6)
    for row in range(7):
        for i in range(4):
            one = x[row : row + 1, i : i + 1].clone()
            assert torch.equal(rms_norm(one, weight, 1e-6)[0, 0], whole[row, i])
            other = x.flip(0)[row : row + 1, i : i + 1].clone()
            assert torch.equal(add_rms_norm(one, other, weight, 1e-6)[0][0, 0], added[row, i])


def test_a_nan_row_stays_in_its_row():
    x, weight = normal(3, 8), normal(8, seed=1)
    clean = rms_norm(x, weight, 1e-6)
    x[1, 3] = NAN
    out = rms_norm(x, weight, 1e-6)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


# --- activation --------------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("shape", [(1, 2), (3, 26), (2, 3, 96)])
def test_silu_mul(dtype, shape):
    gate_up = normal(*shape, dtype=dtype, scale=2.0)
    before = gate_up.clone()
    out = silu_mul(gate_up)
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    gate, up = before.double()[..., : shape[-1] // 2], before.double()[..., shape[-1] // 2 :]
    expected = gate / (1 + (-gate).exp()) * up
    tiny = torch.finfo(dtype).smallest_normal
    assert_within(out, expected, (8 * work_eps(dtype) + 1.5 * torch.finfo(dtype).eps) * expected.abs() + tiny)
    assert torch.equal(gate_up, before)


def test_silu_mul_saturates_without_nan():
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 5.0]])
    assert silu_mul(gate_up)[0].tolist() == [0.0, 3e4, 0.0]


# --- linear ------------------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(dtype, invariant, with_bias):
    for shape in ((1, 33), (5, 33), (2, 3, 64)):
        x, weight = normal(*shape, dtype=dtype), normal(17, shape[-1], dtype=dtype, seed=1)
        bias = normal(17, dtype=dtype, seed=2) if with_bias else None
        out = linear(x, weight, bias, invariant)
        assert out.dtype == dtype
        expected = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        if with_bias:
            expected, size = expected + bias.double(), size + bias.double().abs()
        assert_within(out, expected, shape[-1] * work_eps(dtype) * size + 2 * torch.finfo(dtype).eps * expected.abs())


@every_dtype
@pytest.mark.parametrize(("inner", "outer"), [(33, 17), (64, 96), (130, 7)])
def test_invariant_linear_gives_a_row_the_same_bits_for_any_row_count(dtype, inner, outer):
    rows = 17
    x, weight, bias = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, inner), (outer, inner), (outer,)]))
    alone = torch.cat([linear(x[row : row + 1].clone(), weight, bias, True) for row in range(rows)])
    for count in range(1, rows + 1):
        assert torch.equal(linear(x[:count], weight, bias, True), alone[:count])
        assert torch.equal(linear(x[rows - count :], weight, bias, True), alone[rows - count :])
    grouped = x[:16].view(4, 4, inner)
    assert torch.equal(linear(grouped, weight, bias, True), alone[:16].view(4, 4, outer))
    wide = torch.cat([x, x], 1)[:, :inner]  # rows that are not adjacent
    assert torch.equal(linear(wide, weight, bias, True), alone)
    assert torch.equal(linear(x[:1], weight, bias, False), alone[:1])


# --- RoPE and KV write -------------------------------------------------------------------------------------------------------

BLOCKS, BLOCK_SIZE = 5, 4


def rope_table(positions: int, head_dim: int, dtype=torch.float64) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim).double()
    return torch.cat([angles.cos(), angles.sin()], 1).to(dtype)


def rope_world(dtype=torch.float64, *, rows=3, query_len=2, heads=4, kv_heads=2, head_dim=8, norms=False) -> dict:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    count = rows * query_len
    slots = torch.randperm((BLOCKS - 1) * BLOCK_SIZE, generator=torch.Generator().manual_seed(3))[:count] + BLOCK_SIZE
    return {
        "qkv": normal(rows, query_len, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
        "positions": (torch.arange(count) * 5 % 23).view(rows, query_len),
        "rope": rope_table(24, head_dim, wide),
        "kv_slots": slots.view(rows, query_len),
        "k_cache": normal(BLOCKS, BLOCK_SIZE, kv_heads, head_dim, dtype=dtype, seed=5),
        "v_cache": normal(BLOCKS, BLOCK_SIZE, kv_heads, head_dim, dtype=dtype, seed=6),
        "q_norm": normal(head_dim, dtype=dtype, seed=7) if norms else None,
        "k_norm": normal(head_dim, dtype=dtype, seed=8) if norms else None,
        "num_heads": heads,
        "eps": 1e-5,
    }


def rotate_formula(x, positions, rope):
    """`x [B, Q, heads, D]`, one complex number per pair of the two halves."""
    half = x.shape[-1] // 2
    table = rope.double()[positions][:, :, None]
    turn = torch.complex(table[..., :half], table[..., half:])
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat([turned.real, turned.imag], -1)


@every_dtype
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (1, 1, 2), (6, 2, 32)])
def test_rope_kv_write(dtype, norms, heads, kv_heads, head_dim):
    inputs = rope_world(dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, norms=norms)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    q_out = rope_kv_write(*inputs.values())
    assert q_out.dtype == dtype
    assert q_out.shape == (3, 2, heads, head_dim)

    q, k, v = before["qkv"].double().view(3, 2, -1, head_dim).split([heads, kv_heads, kv_heads], 2)
    if norms:
        q, k = rms_formula(q, before["q_norm"], 1e-5), rms_formula(k, before["k_norm"], 1e-5)

    def check(out, x):
        expected = rotate_formula(x, before["positions"], before["rope"])
        size = x.abs().amax(-1, keepdim=True)
        rounding = torch.finfo(dtype).eps * ((4 * size if norms else 0) + expected.abs())
        assert_within(out, expected, rounding + 16 * work_eps(dtype) * size)

    check(q_out, q)
    keys, values = (inputs[name].view(-1, kv_heads, head_dim) for name in ("k_cache", "v_cache"))
    slots = before["kv_slots"]
    check(keys[slots], k)
    assert torch.equal(values[slots], v.to(dtype))

    # Canaries: every other slot, and every other argument, keeps its bytes.
    others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    others[slots.flatten()] = False
    for name in ("k_cache", "v_cache"):
        old = before[name].view(-1, kv_heads, head_dim)
        assert torch.equal(inputs[name].view(-1, kv_heads, head_dim)[others], old[others])
    for name in before.keys() - {"k_cache", "v_cache"}:
        assert torch.equal(inputs[name], before[name]), name


def test_position_zero_is_the_identity_and_quarter_turns_swap_the_halves():
    inputs = rope_world()
    inputs["positions"] = torch.zeros_like(inputs["positions"])
    q = inputs["qkv"].view(3, 2, -1, 8)[:, :, :4]
    assert torch.equal(rope_kv_write(*inputs.values()), q)
    inputs["rope"] = torch.cat([torch.zeros(24, 4), torch.ones(24, 4)], 1).double()
    assert torch.equal(rope_kv_write(*inputs.values()), torch.cat([-q[..., 4:], q[..., :4]], -1))


def test_positions_beyond_the_table_are_clamped():
    inputs = rope_world()
    inputs["positions"] = torch.tensor([[0, 23], [24, 1000], [-1, -50]])
    out = rope_kv_write(*inputs.values())
    inputs["positions"] = torch.tensor([[0, 23], [23, 23], [0, 0]])
    assert torch.equal(rope_kv_write(*inputs.values()), out)


def as_bytes(cache):
    return cache.contiguous().view(torch.uint8)


@every_dtype
@pytest.mark.parametrize("null", [0.5, NAN, math.inf])
def test_slot_minus_one_writes_nothing(dtype, null):
    """Whatever the null block holds, NaN included, it keeps; so does every slot but those named."""
    inputs = rope_world(dtype, rows=4, query_len=3)
    for name in ("k_cache", "v_cache"):
        inputs[name][0] = null
    inputs["qkv"][1] = NAN  # a padding row full of NaN
    slots = inputs["kv_slots"]
    slots[1] = -1
    slots[0, 2] = slots[3, 0] = -1
    before = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    out = rope_kv_write(*inputs.values())
    assert out[[0, 2, 3]].isfinite().all()
    written = slots[slots >= 0]
    assert len(written) == 7
    for name, old in before.items():
        flat, old_flat = inputs[name].view(-1, 2, 8), old.view(-1, 2, 8)
        keep = torch.ones(len(flat), dtype=torch.bool)
        keep[written] = False
        assert torch.equal(as_bytes(flat[keep]), as_bytes(old_flat[keep]))
        assert (flat[written] != old_flat[written]).any(-1).all()


@every_dtype
def test_a_slot_that_the_cache_does_not_have_is_named(dtype):
    inputs = rope_world(dtype, rows=2)
    slots = inputs["k_cache"].shape[0] * inputs["k_cache"].shape[1]
    inputs["kv_slots"][1, 1] = slots
    before = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=f"^rope_kv_write: kv_slots has {slots}; allowed are slots up to {slots - 1}, and -1$"):
        rope_kv_write(*inputs.values())
    for name, old in before.items():
        assert torch.equal(inputs[name], old)


def test_no_slot_at_all():
    inputs = rope_world(rows=2)
    inputs["kv_slots"] = torch.full((2, 2), -1)
    before = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    rope_kv_write(*inputs.values())
    for name, old in before.items():
        assert torch.equal(inputs[name], old)


@every_dtype
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_whose_blocks_lie_apart_is_refused_before_anything_is_written(dtype, name):
    inputs = rope_world(dtype)
    inputs[name] = inputs[name].repeat_interleave(2, 0)[::2]
    before = {each: inputs[each].clone() for each in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=f"rope_kv_write: {name} must be contiguous; strides are"):
        rope_kv_write(*inputs.values())
    for each, old in before.items():
        assert torch.equal(inputs[each], old)


@every_dtype
@pytest.mark.parametrize("norms", [False, True])
def test_rope_rows_have_the_bits_of_a_row_alone(dtype, norms):
    inputs = rope_world(dtype, rows=4, query_len=3, head_dim=10, norms=norms)
    whole = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    out = rope_kv_write(*(inputs | whole).values())
    for row in range(4):
        for i in range(3):
            one = {name: inputs[name][row : row + 1, i : i + 1].clone() for name in ("qkv", "positions", "kv_slots")}
            alone = {name: inputs[name].clone() for name in whole}
            assert torch.equal(rope_kv_write(*(inputs | one | alone).values())[0, 0], out[row, i])
            slot = inputs["kv_slots"][row, i]
            for name in whole:
                assert torch.equal(alone[name].view(-1, 2, 10)[slot], whole[name].view(-1, 2, 10)[slot])


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("invariant", [False, True])
def test_linear_on_the_cpu_is_the_reference_up_to_rounding(rows, invariant):
    g = torch.Generator().manual_seed(rows)
    x, weight, bias = torch.randn(rows, 48, generator=g), torch.randn(40, 48, generator=g), torch.randn(40, generator=g)
    for b in (None, bias):
        out = linear(x, weight, b, invariant)
        assert out.is_contiguous()
        assert out.shape == (rows, 40)
        torch.testing.assert_close(out, linear_reference(x, weight, b, invariant), rtol=1e-5, atol=1e-5)
