"""Registration of the project's operators with the PyTorch dispatcher, under the namespace `stepgraph`.

One call to `register` gives an op its schema, its implementations by device and its shape function, so that eager code,
FX tracing and CUDA capture all see the same named node.
"""

from collections.abc import Callable

import torch

# The dispatcher keeps registrations only while this handle lives.
LIBRARY = torch.library.Library("stepgraph", "DEF")


def register(schema: str, *, reference: Callable, fake: Callable, cpu: Callable | None = None) -> torch._ops.OpOverload:
    """Register one op and return its overload, which is what callers call.

    Args:
        schema: the op's schema without its namespace, e.g. `"silu_mul(Tensor gate_up) -> Tensor"`.
        reference: the specification; eager torch, any float dtype, no host read, so that it can be captured on any device.
        fake: the shape function, used under FakeTensorMode.
        cpu: a faster implementation for the CPU; there it may read lengths on the host, since the op is opaque to a trace.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, cpu or reference, "CPU")
    LIBRARY.impl(name, reference, "CUDA")
    torch.library.register_fake(f"stepgraph::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.stepgraph, name).default
