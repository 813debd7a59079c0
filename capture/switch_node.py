"""One CUDA graph that runs the one of several captured graphs that a device tensor names (CUDA ≥ 12.8).

    kernel node: cudaGraphSetConditional(handle, *next_body)  →  SWITCH node: body 0 │ body 1 │ …

PyTorch has no API for SWITCH nodes and Triton no builtin for the handle, hence the driver API through `cuda-bindings` and a
kernel compiled by NVRTC. Sources: CUDA driver API, `cuGraphAddNode` and `CUDA_CONDITIONAL_NODE_PARAMS`; CUDA programming
guide, "Conditional Graph Nodes". Nothing here has met a GPU yet: the comments say what each call relies on.
"""

import ctypes
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

# Declared by hand: NVRTC then needs no header path. The driver resolves the function when the module is loaded.
SOURCE = b"""
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);

extern "C" __global__ void select_body(const int* next_body, cudaGraphConditionalHandle handle) {
    cudaGraphSetConditional(handle, (unsigned int)*next_body);
}
"""

NEEDED_VERSION = 12_080  # as cuDriverGetVersion counts: 1000 · major + 10 · minor


class SwitchUnsupported(RuntimeError):
    """This machine cannot choose k on the device; the message says what is missing."""


def require_switch() -> tuple[ModuleType, ModuleType]:
    """The modules `driver` and `nvrtc` of `cuda-bindings`.

    Raises:
        SwitchUnsupported: no CUDA device, no `cuda-bindings`, or either is older than 12.8.
    """
    if not torch.cuda.is_available():
        raise SwitchUnsupported("device-chosen k needs a CUDA device; this machine or this build of torch has none.")
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError:
        raise SwitchUnsupported("device-chosen k needs cuda-bindings 12.8 or newer: pip install 'stepgraph[switch]'.") from None
    (version,) = checked("cuDriverGetVersion", driver.cuDriverGetVersion())
    if version < NEEDED_VERSION:
        found = f"{version // 1000}.{version % 1000 // 10}"
        raise SwitchUnsupported(f"device-chosen k needs CUDA 12.8 or newer; the driver supports {found}.")
    if not hasattr(driver.CUgraphConditionalNodeType, "CU_GRAPH_COND_TYPE_SWITCH"):
        raise SwitchUnsupported("device-chosen k needs cuda-bindings 12.8 or newer; the one installed has no SWITCH nodes.")
    return driver, nvrtc


def checked(call: str, result: tuple) -> tuple:
    """The values of a `cuda.bindings` call, which returns (error, *values)."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"{call} failed: {error.name}")
    return tuple(values)


def compile_setter(nvrtc: ModuleType, arch: str) -> bytes:
    """`SOURCE` as a cubin for `arch`, for example "sm_90"; takes no GPU."""
    (program,) = checked("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(SOURCE, b"select_body.cu", 0, None, None))
    try:
        checked("nvrtcCompileProgram", nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()]))
        (size,) = checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
        cubin = b" " * size  # written in place; that is how these bindings return bytes
        checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin


class SwitchNode:
    """The executable graph.

    Args:
        next_body: `[1]` int32 on the device; read when the graph runs, after everything before it in the stream. From
            `len(bodies)` on nothing runs.
        bodies: graphs captured with `keep_graph=True` on the current device. They may hold kernel, empty, child-graph, memset,
            memcpy and conditional nodes only: no allocations (PyTorch's caching allocator makes none in a capture), no host
            functions, no events.
    """

    def __init__(self, next_body: Tensor, bodies: Sequence[torch.cuda.CUDAGraph]):
        if next_body.dtype != torch.int32 or next_body.numel() != 1:
            raise ValueError(f"next_body is {next_body.dtype} {list(next_body.shape)}; it must be one int32")
        self.driver, nvrtc = require_switch()
        driver = self.driver
        # A child node holds a copy of its graph, but the memory that the nodes use stays with the CUDAGraph objects, and
        # the kernel nodes point at the policy's tensor and at the module.
        self.next_body, self.bodies = next_body, tuple(bodies)
        self.module = self.graph = self.executable = None
        try:
            self._build(driver, nvrtc, next_body, bodies)
        except Exception:
            self.destroy()
            raise

    def _build(self, driver: ModuleType, nvrtc: ModuleType, next_body: Tensor, bodies: Sequence[torch.cuda.CUDAGraph]) -> None:
        major, minor = torch.cuda.get_device_capability(next_body.device)
        cubin = compile_setter(nvrtc, f"sm_{major}{minor}")
        address = ctypes.cast(cubin, ctypes.c_void_p).value
        # PyTorch works in the device's primary context, which is current on this thread since a tensor lives there; all
        # kernels of a conditional node must be of one context.
        (self.module,) = checked("cuModuleLoadData", driver.cuModuleLoadData(address))
        (function,) = checked("cuModuleGetFunction", driver.cuModuleGetFunction(self.module, b"select_body"))
        (context,) = checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())

        (self.graph,) = checked("cuGraphCreate", driver.cuGraphCreate(0))
        # No default value (flags 0): the kernel node sets one in every launch, before the SWITCH node looks.
        (handle,) = checked("cuGraphConditionalHandleCreate", driver.cuGraphConditionalHandleCreate(self.graph, context, 0, 0))
        kernel = driver.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = function
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
        kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
        kernel.sharedMemBytes = 0
        # The node copies the arguments' values.
        kernel.kernelParams = ((next_body.data_ptr(), int(handle)), (ctypes.c_void_p, ctypes.c_uint64))
        (setter,) = checked("cuGraphAddKernelNode", driver.cuGraphAddKernelNode(self.graph, None, 0, kernel))

        switch = driver.CUgraphNodeParams()
        switch.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        switch.conditional.handle = handle
        switch.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
        switch.conditional.size = len(bodies)
        switch.conditional.ctx = context
        # cuda-bindings 12 calls the form with edge data `_v2`, cuda-bindings 13 has only that one and drops the suffix.
        add_node = getattr(driver, "cuGraphAddNode_v2", None) or driver.cuGraphAddNode
        checked("cuGraphAddNode (SWITCH)", add_node(self.graph, [setter], None, 1, switch))
        # phGraph_out is filled in by the call that adds the node: `size` empty graphs, owned by the node.
        for body, captured in zip(switch.conditional.phGraph_out, bodies, strict=True):
            child = driver.CUgraph(captured.raw_cuda_graph())
            checked("cuGraphAddChildGraphNode", driver.cuGraphAddChildGraphNode(body, None, 0, child))
        (self.executable,) = checked("cuGraphInstantiate", driver.cuGraphInstantiate(self.graph, 0))

    def launch(self) -> None:
        """Run it once in the current stream."""
        stream = self.driver.CUstream(torch.cuda.current_stream().cuda_stream)
        checked("cuGraphLaunch", self.driver.cuGraphLaunch(self.executable, stream))

    def destroy(self) -> None:
        """Free it; the device must be done with it."""
        for name, free in (("executable", "cuGraphExecDestroy"), ("graph", "cuGraphDestroy"), ("module", "cuModuleUnload")):
            if getattr(self, name) is not None:
                checked(free, getattr(self.driver, free)(getattr(self, name)))
                setattr(self, name, None)
        self.bodies = ()
