"""Timing of one call on CUDA (graph replays, warm and cold L2) or on the CPU, and the copy bandwidth to hold it against."""

import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice

import torch

QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
CPU_SAMPLES = 5
REPLAYS = 30


def time_calls(call: Callable, argument_sets: Sequence[tuple], device: torch.device) -> dict[str, float]:
    """Microseconds per call, as quantiles. Calls take the argument sets in turn: one set is warm, many are cold.

    On CUDA the calls are captured in one graph, so that launch overhead on the host is not in the figure.
    """
    if device.type == "cuda":
        samples = _graph_samples(call, argument_sets)
    else:
        samples = []
        for arguments in islice(cycle(argument_sets), CPU_SAMPLES + 1):
            start = time.perf_counter()
            call(*arguments)
            samples.append((time.perf_counter() - start) * 1e6)
        samples = samples[1:]
    times = torch.tensor(samples, dtype=torch.float64)
    return {name: round(float(times.quantile(q)), 3) for name, q in QUANTILES.items()}


def _graph_samples(call: Callable, argument_sets: Sequence[tuple]) -> list[float]:
    calls = max(len(argument_sets), 10)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in argument_sets:
            call(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in islice(cycle(argument_sets), calls):
            call(*arguments)
    samples = []
    for index in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 3:
            samples.append(start.elapsed_time(end) * 1e3 / calls)
    return samples


def cold_sets(arguments: tuple, nbytes: int, device: torch.device) -> list[tuple]:
    """Copies of the arguments that together are 4 times the L2 cache, so that none is found there; at most 64 sets."""
    if device.type != "cuda":
        return [arguments]
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(64, max(2, -(-4 * l2 // max(nbytes, 1))))
    return [tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments) for _ in range(count)]


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Measured GB/s of a device-to-device copy, reads and writes counted; of memory, not of a cache."""
    elements = 2**30 if device.type == "cuda" else 2**26
    source = torch.ones(elements, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * elements / time_calls(target.copy_, [(source,)], device)["p50"] / 1e3


@cache
def environment(device: torch.device) -> dict[str, str]:
    """What a figure depends on beside the code."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
