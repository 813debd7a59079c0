"""`torch.cuda.CUDAGraph`s of a step, or of pieces of it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from stepgraph.capture.state import DecodeState


@contextmanager
def padding_only(state: DecodeState) -> Iterator[None]:
    """Every row is padding inside, which changes no state: whoever warms up or captures here does nothing else."""
    kept = state.slots.clone()
    state.slots.fill_(-1)
    try:
        yield
    finally:
        state.slots.copy_(kept)


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """No garbage collection inside: a tensor freed by the collector during a capture would be freed in the graph."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()


def warm_up(call: Callable[[], None]) -> None:
    """Run on a side stream, twice: lazy initialisation (JIT, cuBLAS handles and workspaces) must not happen in a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)


def capture_call(call: Callable[[], None], pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """Capture what `call` launches, in the memory pool `pool` (`torch.cuda.graph_pool_handle()`)."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # kept, so that its nodes can be counted and a SWITCH node can hold it
    # thread_local: another thread that calls into CUDA meanwhile is its own affair.
    with torch.no_grad(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        call()
    graph.instantiate()
    return graph


def count_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """Nodes of a captured graph; None where `cuda-bindings` is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    error, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()))
    return int(count) if int(error) == 0 else None
