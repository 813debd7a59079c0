"""One `torch.cuda.CUDAGraph` for a whole step."""

import gc

import torch

from stepgraph.capture.keys import GraphKey
from stepgraph.capture.step import SpeculativeStep


def capture_cuda_graph(step: SpeculativeStep, key: GraphKey, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """Warm up and capture the step for one key, in the memory pool `pool` (`torch.cuda.graph_pool_handle()`).

    Both run with padding rows only, which change no state, so capturing does nothing but capture. The warm-up runs on a side
    stream: lazy initialisation (JIT, cuBLAS handles and workspaces) must not happen inside the capture.
    """
    slots = step.state.slots
    kept = slots.clone()
    slots.fill_(-1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # a tensor freed by the collector during the capture would be freed inside the graph
    try:
        with torch.no_grad():
            with torch.cuda.stream(side):
                for _ in range(2):
                    step(key.batch, key.k)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step(key.batch, key.k)
    finally:
        if collecting:
            gc.enable()
        slots.copy_(kept)
    return graph
