"""Registration of the project's operators with the PyTorch dispatcher, under the namespace `stepgraph`.

One call to `register` gives an op its schema, its implementations and its shape function, so that eager code, FX tracing
and CUDA capture all see the same named node. Which implementation runs:

| tensors | implementation |
|---|---|
| CPU | `numba` where the op has one and Numba is installed, else `cpu` where it has one, else the reference |
| CPU, one that gradients are wanted of | `cpu` where the op has one, else the reference: compiled code has no gradient |
| CUDA, no float64 among them | the Triton kernel where the op has one, else the reference |
| CUDA, float64 | the reference: float64 is there to check with, and no kernel is written for it |

`use_implementation` overrides that choice, and then nothing falls back: an op without the implementation asked for raises.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from importlib import import_module

import torch

# The dispatcher keeps registrations only while this handle lives.
LIBRARY = torch.library.Library("stepgraph", "DEF")

# op name -> implementation name -> function, or "module:function" where importing it has to wait (Triton).
IMPLEMENTATIONS: dict[str, dict[str, Callable | str]] = {}


class NoImplementation(NotImplementedError):
    """The implementation that was asked for does not exist for this op."""


@dataclass(frozen=True)
class _Request:
    which: str
    except_for: frozenset[str]


_REQUEST: ContextVar[_Request | None] = ContextVar("stepgraph_implementation", default=None)


def implementation(op: str, which: str) -> Callable:
    """The function behind one op: `implementation("rms_norm", "triton")`.

    Args:
        op: the op's name without its namespace.
        which: `"reference"`, `"cpu"`, `"numba"` or `"triton"`.

    Raises:
        NoImplementation: the op has no such implementation.
    """
    known = IMPLEMENTATIONS.get(op, {})
    if which not in known:
        raise NoImplementation(f"{op} has no implementation {which!r}; it has {', '.join(sorted(known)) or 'none'}")
    function = known[which]
    if isinstance(function, str):
        module, _, name = function.partition(":")
        function = known[which] = getattr(import_module(module), name)
    return function


@contextmanager
def use_implementation(which: str, *, except_for: Iterable[str] = ()) -> Iterator[None]:
    """Run every op on one implementation, whatever the device, while the context lasts.

    Args:
        which: `"reference"`, `"cpu"`, `"numba"` or `"triton"`.
        except_for: names of ops that keep the implementation they would have had.
    """
    token = _REQUEST.set(_Request(which, frozenset(except_for)))
    try:
        yield
    finally:
        _REQUEST.reset(token)


def is_overridden() -> bool:
    """Whether `use_implementation` chooses at the moment."""
    return _REQUEST.get() is not None


def implementation_on_cpu(target: object) -> Callable | None:
    """The function that runs for CPU tensors unless `use_implementation` chooses; None for what is not an op of ours."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "stepgraph":
        return None
    return _best_on_cpu(target._schema.name.partition("::")[2])


def _best_on_cpu(op: str, with_gradient: bool = False) -> Callable:
    """The fastest that there is; an op whose Numba kernel cannot be imported loses it."""
    known = IMPLEMENTATIONS[op]
    if isinstance(known.get("numba"), str):
        try:
            implementation(op, "numba")
        except ImportError as error:
            if not isinstance(error, ModuleNotFoundError):  # installed, and at odds with something else
                warnings.warn(f"{op} runs without Numba: {error}", stacklevel=3)
            del known["numba"]
    ways = ("cpu", "reference") if with_gradient else ("numba", "cpu", "reference")
    return implementation(op, next(which for which in ways if which in known))


def use_triton_on_cpu(*, except_for: Iterable[str] = ()):
    """Run the Triton kernels on CPU tensors, which takes a process started with `TRITON_INTERPRET=1`."""
    return use_implementation("triton", except_for=except_for)


def register(
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    cpu: Callable | str | None = None,
    numba: str | None = None,
    triton: str | None = None,
    cuda: Callable | None = None,
    check: Callable[..., None] | None = None,
) -> torch._ops.OpOverload:
    """Register one op and return its overload, which is what callers call.

    Args:
        schema: the op's schema without its namespace, e.g. `"silu_mul(Tensor gate_up) -> Tensor"`.
        reference: the specification; eager torch, any float dtype, no host read, so that it can be captured on any device.
        fake: the shape function, used under FakeTensorMode.
        cpu: a faster implementation for the CPU; there it may read lengths on the host, since the op is opaque to a trace;
            a function, or where it is, as below.
        numba: `"module:function"` of a faster one still, which needs Numba.
        triton: `"module:function"` of the Triton launcher; imported when it is first asked for.
        cuda: picks between implementations by argument; default the Triton launcher.
        check: takes the op's arguments and raises a ValueError where they mean nothing; runs before any implementation and the
            shape function, and reads no values. Launchers, which can be called without the op, run it themselves.
    """
    name = schema.partition("(")[0]
    functions = {"reference": reference, "cpu": cpu, "numba": numba, "triton": triton}
    IMPLEMENTATIONS[name] = {which: function for which, function in functions.items() if function is not None}

    def requested() -> str | None:
        request = _REQUEST.get()
        return None if request is None or name in request.except_for else request.which

    def checked(function: Callable) -> Callable:
        if check is None:
            return function

        @wraps(function)
        def run(*args, **kwargs):
            check(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    def on_cpu(*args, **kwargs):
        which = requested()
        function = _best_on_cpu(name, learns(*args, *kwargs.values())) if which is None else implementation(name, which)
        return function(*args, **kwargs)

    def on_cuda(*args, **kwargs):
        which = requested()
        if which is None and (triton is None or _any_float64(args) or _any_float64(kwargs.values())):
            which = "reference"
        if which is None and cuda is not None:
            return cuda(*args, **kwargs)
        return implementation(name, which or "triton")(*args, **kwargs)

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, checked(on_cpu), "CPU")
    LIBRARY.impl(name, checked(on_cuda), "CUDA")
    torch.library.register_fake(f"stepgraph::{name}", checked(fake), lib=LIBRARY)
    return getattr(torch.ops.stepgraph, name).default


def learns(*values: object) -> bool:
    """Whether a gradient is wanted of a tensor among an op's arguments."""
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _any_float64(values: Iterable) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in values)
