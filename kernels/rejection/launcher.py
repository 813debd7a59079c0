"""Launches of rejection sampling: laws of all rows, block residuals, acceptance, the race for the last token, emission."""

import torch
import triton
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, dense, launch
from stepgraph.kernels.rejection.decide import check_arguments
from stepgraph.kernels.rejection.kernels import accept_kernel, block_residual_kernel, emit_kernel, final_race_kernel
from stepgraph.kernels.row_law_triton import row_law
from stepgraph.kernels.sampling_triton import BLOCK, TILES

# Requests of one program of the acceptance kernel, a lane each.
ROWS = 32


def rejection_sample_triton(
    logits: Tensor,
    draft_tokens: Tensor,
    draft_law: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    base: Tensor,
    method: Tensor | None = None,
    rates: Tensor | None = None,
    one_hot: Tensor | None = None,
    d2t: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as `rejection_sample_reference`; five launches (four without a method or with one draft)."""
    check_kernel_dtype("rejection_sample", logits, draft_law)
    check_arguments(logits, draft_tokens, draft_law, temperature, top_k, top_p, min_p, seed, base, method, rates, one_hot, d2t)
    logits = dense(logits)
    batch, query_len, vocab = logits.shape
    k, device = query_len - 1, logits.device
    law = row_law(logits.view(batch * query_len, vocab), temperature, top_k, top_p, min_p, query_len)

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if k == 0:
        draft_law = method = rates = one_hot = None
    t2d = None
    if draft_law is not None and d2t is not None:
        index = torch.arange(d2t.shape[0], device=device)
        t2d = torch.full((vocab,), -1, dtype=torch.int64, device=device).index_copy(0, d2t, index)
    splits = triton.cdiv(vocab, BLOCK * TILES)
    left, scale = new(batch, k, dtype=torch.float32), new(batch, dtype=torch.float32)
    emitted, accepted, repaired, residual = new(batch, query_len), new(batch), new(batch), new(batch, dtype=torch.int32)
    best, winner = new(batch, 2, splits, dtype=torch.float64), new(batch, 2, splits, dtype=torch.int32)

    draft_tokens = dense(draft_tokens)
    common = {
        "logits_ptr": logits,
        "draft_tokens_ptr": draft_tokens,
        "draft_law_ptr": None if draft_law is None else dense(draft_law),
        "t2d_ptr": t2d,
        "temperature_ptr": dense(temperature),
        "one_hot_ptr": None if one_hot is None else dense(one_hot),
        **law.arguments,
        "vocab": vocab,
        "width": 0 if draft_law is None else draft_law.shape[-1],
    }
    flags = {"K": k, "HAS_LAW": draft_law is not None, "HAS_MAP": t2d is not None, "HAS_ONE_HOT": one_hot is not None}
    methods = None if method is None else dense(method)
    numbers = {"seed_ptr": dense(seed), "base_ptr": dense(base)}
    if method is not None and k > 1:
        # One program per request and draft that has one after it.
        launch(
            LaunchSpec(
                kernel=block_residual_kernel,
                grid=(batch, k - 1),
                args={**common, "method_ptr": methods, "left_ptr": left},
                constexprs={**flags, "BLOCK": BLOCK},
            )
        )
    # One program per ROWS requests.
    launch(
        LaunchSpec(
            kernel=accept_kernel,
            grid=(triton.cdiv(batch, ROWS),),
            args={
                **common,
                **numbers,
                "method_ptr": methods,
                "rates_ptr": None if rates is None else dense(rates),
                "left_ptr": left,
                "accepted_ptr": accepted,
                "scale_ptr": scale,
                "residual_ptr": residual,
                "repaired_ptr": repaired,
                "batch": batch,
                "rates_stride": 0 if rates is None else rates.shape[1],
            },
            constexprs={**flags, "HAS_METHOD": method is not None, "HAS_RATES": rates is not None, "ROWS": ROWS},
            num_warps=1,
        )
    )
    # One program per request and stretch of TILES tiles of the vocabulary.
    launch(
        LaunchSpec(
            kernel=final_race_kernel,
            grid=(batch, splits),
            args={
                **common,
                **numbers,
                "accepted_ptr": accepted,
                "scale_ptr": scale,
                "residual_ptr": residual,
                "best_ptr": best,
                "winner_ptr": winner,
            },
            constexprs={**flags, "BLOCK": BLOCK, "TILES": TILES},
            num_warps=8,
        )
    )
    # One program per request.
    launch(
        LaunchSpec(
            kernel=emit_kernel,
            grid=(batch,),
            args={
                "draft_tokens_ptr": draft_tokens,
                "accepted_ptr": accepted,
                "best_ptr": best,
                "winner_ptr": winner,
                "emitted_ptr": emitted,
                "splits": splits,
            },
            constexprs={
                "K": k,
                "K_PAD": triton.next_power_of_2(query_len),
                "SPLIT_PAD": triton.next_power_of_2(splits),
            },
            num_warps=1,
        )
    )
    return emitted, accepted, repaired
