"""What launching costs: an empty graph, a node, the gap between graphs, a SWITCH node.

The assumed figures of a plan (`stepgraph.capture.plan.overhead`) are to be replaced by these.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.cuda import capture_call, warm_up
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.policies.device import DeviceTablePolicy
from stepgraph.capture.replay_timer import place_everywhere, quantiles
from stepgraph.capture.schedule import Schedule
from stepgraph.capture.switch import SwitchGraphs, SwitchStep
from stepgraph.capture.switch_node import SwitchUnsupported

NODES = (1, 10, 100, 1000)
REPLAYS = 50


class HostGraph:
    """Stands for a CUDA graph where there is no GPU, so that everything around it runs there too."""

    def __init__(self, call: Callable[[], None]):
        self.replay = call


def capture(call: Callable[[], None], device: torch.device):
    """A graph of what `call` launches."""
    if device.type != "cuda":
        return HostGraph(call)
    warm_up(call)
    return capture_call(call, torch.cuda.graph_pool_handle())


def device_us(call: Callable[[], None], device: torch.device, samples: int) -> list[float]:
    """Microseconds between two events around each call; on a CPU, of the call."""
    found = []
    for _ in range(samples + 3):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
        else:
            start_s = time.perf_counter()
            call()
            found.append((time.perf_counter() - start_s) * 1e6)
    return found[3:]


def host_us(call: Callable[[], None], device: torch.device, samples: int) -> list[float]:
    """Microseconds until the call has returned, with the device idle before it."""
    found = []
    for _ in range(samples + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        call()
        found.append((time.perf_counter() - start_s) * 1e6)
    return found[3:]


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """Rows `{"what", "x", "unit", "p20", "p50", "p80"}`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    samples, sizes = (5, NODES[:2]) if quick else (REPLAYS, NODES)
    x = torch.zeros(32, device=device)

    def adds(count: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(count):
                x.add_(1)

        return call

    def row(what: str, at: int, values: list[float]) -> dict:
        return {"what": what, "x": at, "unit": "us", **{name: round(value, 3) for name, value in quantiles(values).items()}}

    graphs = {count: capture(adds(count), device) for count in sizes}
    for count, graph in graphs.items():
        times = device_us(graph.replay, device, samples)
        yield row("graph of n nodes, device", count, times)
        yield row("graph of n nodes, host launch", count, host_us(graph.replay, device, samples))
        yield row("a node of a graph", count, [each / count for each in times])
    small, pair = graphs[sizes[1]], capture(adds(2 * sizes[1]), device)

    def twice() -> None:
        small.replay()
        small.replay()

    gap = median(device_us(twice, device, samples)) - median(device_us(pair.replay, device, samples))
    yield row("gap between two graphs", sizes[1], [gap])
    yield from switch_rows(device, samples, row)


def switch_rows(device: torch.device, samples: int, row: Callable[[str, int, list[float]], dict]) -> Iterator[dict]:
    """The same step chosen by the host and by a SWITCH node, on a tiny model, whose kernels hide nothing."""
    options = EngineOptions("random:tiny-llama", "ngram", k=3, max_batch=2, max_len=64, dtype="float32")
    engine = build_engine(options).engine
    step = engine.graphs.step
    place_everywhere(step.state, 8)
    step.state.set_rows([0, 1])
    kept = step.state.seq_len.clone()
    policy = DeviceTablePolicy(Schedule.parse([[1, 2, 3]]), 2, device)
    chosen = SwitchStep(step, policy)
    plain = type(engine.graphs)(chosen, KeySet([GraphKey(2, 3)]))
    plain.capture()

    def replay(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            step.state.seq_len.copy_(kept)
            call()

        return run

    yield row("step, k chosen by the host", 2, device_us(replay(lambda: plain.replay(2, 3)), device, samples))
    try:
        switch = SwitchGraphs(chosen, [2])
        switch.capture()
    except SwitchUnsupported as error:
        yield {"what": "step, k chosen by a SWITCH node", "x": 2, "status": f"absent: {error}"}
        return
    yield row("step, k chosen by a SWITCH node", 2, device_us(replay(lambda: switch.replay(2)), device, samples))
