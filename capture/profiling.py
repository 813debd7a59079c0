"""A profile of whole steps for Perfetto or chrome://tracing, with the phases of a step as named ranges."""

import os

import torch
from torch.profiler import ProfilerActivity, profile

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.phases import named_range
from stepgraph.capture.trace import trace_step


def export_profile(graphs: StepGraphs, batch: int, k: int, path: str | os.PathLike[str], steps: int = 3) -> None:
    """Profile steps for the first `batch` rows of the state and write them as a Chrome trace.

    The steps are real ones and advance the requests. On CUDA each is a replay of its graph, followed by an eager step whose
    kernels lie in ranges by phase (a graph is one launch, with no ranges inside); elsewhere each is a replay of the traced
    step, node by node, in ranges by phase.

    Args:
        graphs: whose step and keys to use.
        batch: live rows.
        k: drafts a row.
        path: JSON file to write.
        steps: how many.
    """
    step = graphs.step
    on_cuda = step.state.slots.is_cuda
    key = graphs.keys.lookup(batch, k)
    bucket = batch if key is None else key.batch
    step.state.pad_rows(batch)
    traced = None if on_cuda else trace_step(step, bucket, k)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with torch.no_grad(), profile(activities=activities) as profiler:
        for _ in range(steps):
            with named_range(f"step {bucket}x{k}"):
                if traced is not None:
                    traced.replay_in_ranges()
                else:
                    graphs.replay(batch, k)
                    step(bucket, k)
        if on_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(os.fspath(path))
