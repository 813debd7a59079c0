"""Attention of a few query tokens per request over a paged KV cache, the same number for every request."""

from stepgraph.kernels.attention.cpu import uniform_decode_attention_cpu
from stepgraph.kernels.attention.reference import check_attention, uniform_decode_attention_reference
from stepgraph.kernels.attention.work import build_attention_work
from stepgraph.kernels.registry import register
from stepgraph.kernels.support import CaptureSupport

CAPTURE_SUPPORT = CaptureSupport.UNIFORM_BATCH

__all__ = [
    "CAPTURE_SUPPORT",
    "build_attention_work",
    "uniform_decode_attention",
    "uniform_decode_attention_cpu",
    "uniform_decode_attention_reference",
]


def _fake(q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap, kv_scales=None, work=None, scratch=None):
    return q.new_empty(q.shape)


uniform_decode_attention = register(
    "uniform_decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "float scale, int window, float softcap, Tensor? kv_scales=None, Tensor? work=None, Tensor(a!)? scratch=None) -> Tensor",
    reference=uniform_decode_attention_reference,
    cpu=uniform_decode_attention_cpu,
    numba="stepgraph.kernels.attention.numba_cpu:uniform_decode_attention_numba",
    triton="stepgraph.kernels.attention.launcher:uniform_decode_attention_triton",
    fake=_fake,
    check=check_attention,
)
