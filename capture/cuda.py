"""One `torch.cuda.CUDAGraph` for a whole step."""

import gc

import torch

from stepgraph.capture.keys import GraphKey
from stepgraph.capture.step import SpeculativeStep


class CudaStepGraph:
    """A captured step and the device memory pool it owns a share of."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


def capture_cuda_graph(step: SpeculativeStep, key: GraphKey) -> CudaStepGraph:
    """Warm up and capture the step for one key.

    Both run with padding rows only, which change no state, so capturing does nothing but capture. The warm-up runs on a side
    stream: lazy initialisation (JIT, cuBLAS handles and workspaces) must not happen inside the capture.
    """
    slots = step.state.slots
    kept = slots.clone()
    slots.fill_(-1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # a tensor freed by the collector during the capture would be freed inside the graph
    gc.disable()
    try:
        with torch.no_grad():
            with torch.cuda.stream(side):
                for _ in range(2):
                    step(key.batch, key.k)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step(key.batch, key.k)
    finally:
        gc.enable()
        slots.copy_(kept)
    return CudaStepGraph(graph)
