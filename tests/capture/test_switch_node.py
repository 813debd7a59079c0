"""The SWITCH node as far as it goes without a GPU: what is missing, the order of the calls, the kernel by NVRTC."""

import ctypes
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from worlds import tiny_step

from stepgraph.capture import switch
from stepgraph.capture.policies.device import DeviceAcceptancePolicy
from stepgraph.capture.switch import SwitchGraphs, SwitchStep
from stepgraph.capture.switch_node import SOURCE, SwitchNode, SwitchUnsupported, compile_setter, require_switch


class Result(IntEnum):
    SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class FakeDriver:
    """Records the calls of the driver API; `fails` names one that returns an error."""

    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL=13)
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace
    CUgraph = staticmethod(lambda pointer: ("graph", pointer))
    CUstream = staticmethod(lambda pointer: ("stream", pointer))

    def __init__(self, version=12_080, fails=None, switch=True):
        self.version, self.fails, self.calls = version, fails, []
        kinds = {"CU_GRAPH_COND_TYPE_IF": 0} | ({"CU_GRAPH_COND_TYPE_SWITCH": 2} if switch else {})
        self.CUgraphConditionalNodeType = SimpleNamespace(**kinds)

    def CUgraphNodeParams(self):
        return SimpleNamespace(conditional=SimpleNamespace())

    def __getattr__(self, name):
        if not name.startswith("cu") or name == "cuGraphAddNode_v2":
            raise AttributeError(name)

        def call(*args):
            self.calls.append((name, args))
            if name == self.fails:
                return (Result.CUDA_ERROR_INVALID_VALUE, None)
            if name == "cuGraphAddNode":
                args[-1].conditional.phGraph_out = [f"body {i}" for i in range(args[-1].conditional.size)]
            values = {
                "cuDriverGetVersion": self.version,
                "cuModuleLoadData": "module",
                "cuModuleGetFunction": "function",
                "cuCtxGetCurrent": "context",
                "cuGraphCreate": "whole",
                "cuGraphConditionalHandleCreate": 77,
                "cuGraphAddKernelNode": "setter",
                "cuGraphAddNode": "switch",
                "cuGraphAddChildGraphNode": "child",
                "cuGraphInstantiate": "executable",
            }
            return (Result.SUCCESS, values[name]) if name in values else (Result.SUCCESS,)

        return call


class FakeNvrtc:
    def __getattr__(self, name):
        values = {"nvrtcCreateProgram": "program", "nvrtcGetCUBINSize": 8}
        return lambda *args: (Result.SUCCESS, values[name]) if name in values else (Result.SUCCESS,)


@pytest.fixture
def machine(monkeypatch):
    """`machine(...)`: from now on there seems to be CUDA with these bindings; returns the driver."""

    def pretend(driver=None, nvrtc=None):
        driver = driver or FakeDriver()
        bindings = ModuleType("cuda.bindings")
        bindings.driver, bindings.nvrtc = driver, nvrtc or FakeNvrtc()
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
        return driver

    return pretend


def body(pointer: int):
    return SimpleNamespace(raw_cuda_graph=lambda: pointer)


def test_what_is_missing_is_one_sentence(monkeypatch, machine):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SwitchUnsupported, match="needs a CUDA device; this machine or this build of torch has none"):
        require_switch()
    machine(FakeDriver(version=12_060))
    with pytest.raises(SwitchUnsupported, match=r"needs CUDA 12\.8 or newer; the driver supports 12\.6\."):
        require_switch()
    machine(FakeDriver(switch=False))
    with pytest.raises(SwitchUnsupported, match="the one installed has no SWITCH nodes"):
        require_switch()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(SwitchUnsupported, match=r"pip install 'stepgraph\[switch\]'"):
        require_switch()


def test_calls_that_make_the_node(machine):
    driver = machine()
    next_body = torch.zeros(1, dtype=torch.int32)
    node = SwitchNode(next_body, [body(100), body(101), body(102)])
    calls = dict(driver.calls)
    assert [name for name, _ in driver.calls] == [
        "cuDriverGetVersion", "cuModuleLoadData", "cuModuleGetFunction", "cuCtxGetCurrent", "cuGraphCreate",
        "cuGraphConditionalHandleCreate", "cuGraphAddKernelNode", "cuGraphAddNode", *["cuGraphAddChildGraphNode"] * 3,
        "cuGraphInstantiate",
    ]  # fmt: skip
    assert calls["cuGraphConditionalHandleCreate"] == ("whole", "context", 0, 0)
    graph, dependencies, count, kernel = calls["cuGraphAddKernelNode"]
    assert (graph, dependencies, count, kernel.func) == ("whole", None, 0, "function")
    assert kernel.kernelParams == ((next_body.data_ptr(), 77), (ctypes.c_void_p, ctypes.c_uint64))
    graph, dependencies, edges, count, params = calls["cuGraphAddNode"]
    assert (graph, dependencies, edges, count) == ("whole", ["setter"], None, 1)
    assert (params.type, params.conditional.handle, params.conditional.type, params.conditional.size) == (13, 77, 2, 3)
    children = [args for name, args in driver.calls if name == "cuGraphAddChildGraphNode"]
    assert children == [(f"body {i}", None, 0, ("graph", 100 + i)) for i in range(3)]
    node.launch()
    assert driver.calls[-1] == ("cuGraphLaunch", ("executable", ("stream", 5)))
    node.destroy()
    node.destroy()
    freed = [("cuGraphExecDestroy", ("executable",)), ("cuGraphDestroy", ("whole",)), ("cuModuleUnload", ("module",))]
    assert driver.calls[-3:] == freed


def test_a_failure_frees_what_was_made(machine):
    driver = machine(FakeDriver(fails="cuGraphAddChildGraphNode"))
    with pytest.raises(RuntimeError, match="cuGraphAddChildGraphNode failed: CUDA_ERROR_INVALID_VALUE"):
        SwitchNode(torch.zeros(1, dtype=torch.int32), [body(1)])
    assert [name for name, _ in driver.calls[-2:]] == ["cuGraphDestroy", "cuModuleUnload"]


@pytest.mark.parametrize("tensor", [torch.zeros(1), torch.zeros(2, dtype=torch.int32)])
def test_bad_selector(machine, tensor):
    machine()
    with pytest.raises(ValueError, match="it must be one int32"):
        SwitchNode(tensor, [])


def test_graphs_of_a_bucket_become_one_node_and_again_after_a_new_capture(monkeypatch):
    """The part of `SwitchGraphs` that only CUDA runs, over FX bodies and nodes that do nothing."""
    made = []

    class Node:
        def __init__(self, next_body, bodies):
            self.bodies, self.launches, self.freed = tuple(bodies), 0, False
            made.append(self)

        def launch(self):
            self.launches += 1

        def destroy(self):
            self.freed = True

    monkeypatch.setattr(switch, "SwitchNode", Node)
    step = SwitchStep(tiny_step("ngram"), DeviceAcceptancePolicy((0, 2), (0.5,)))
    graphs = SwitchGraphs(step, (1, 3))
    graphs.on_cuda = True
    step.state.set_rows([0, 1, 2])
    assert graphs.replay(2) == 3
    assert [node.launches for node in made] == [0, 1]
    assert step.state.slots.tolist() == [0, 1, -1, -1]
    graphs.capture()
    assert len(made) == 2
    graphs.graphs.destroy()
    graphs.capture()
    assert [node.freed for node in made] == [True, True, False, False]
    graphs.destroy()
    assert all(node.freed for node in made)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernel_compiles_without_a_gpu(arch):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # each release of the bindings has its own
        pytest.skip(f"no NVRTC library: {error}")
    cubin = compile_setter(nvrtc, arch)
    assert cubin[:4] == b"\x7fELF"
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 10
