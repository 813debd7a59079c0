"""Loops that Numba compiles where it is installed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def jit(function: Callable, **options) -> Callable:
    """`numba.njit`, its code kept beside the source or in the user's cache folder, and nowhere if neither can be written.

    Raises:
        ImportError: there is no Numba, or it is told not to compile.
    """
    from numba import config, njit

    if config.DISABLE_JIT:  # our loops read tensors by address, which Python cannot
        raise ImportError("NUMBA_DISABLE_JIT is set")
    try:
        dispatcher = njit(cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # a read-only installation and no home
        return njit(error_model="numpy", **options)(function)
    _follow_all_kernels(dispatcher)
    return dispatcher


def jit_for_threads(function: Callable) -> Callable:
    """`function(int64 address)` as code that any thread may run, at `.address`; kept as by `jit`."""
    from numba.core import sigutils
    from numba.core.ccallback import CFunc

    compiled = CFunc(function, sigutils.normalize_signature("void(int64)"), {}, {"error_model": "numpy"})
    try:
        compiled.enable_caching()
    except RuntimeError:  # a read-only installation and no home
        pass
    else:
        _follow_all_kernels(compiled)
    compiled.compile()
    return compiled


def _follow_all_kernels(dispatcher: Any) -> None:
    """Numba compiles anew when the function's own file has changed; what it calls and takes constants from lies in others."""
    kept = dispatcher._cache._cache_file
    kept._source_stamp = (kept._source_stamp, _stamp_of_kernels())


@cache
def _stamp_of_kernels() -> int:
    """Once in a process: every compiled function asks for it, at its import."""
    return sources_stamp(Path(__file__).parent)


def sources_stamp(folder: Path) -> int:
    """A number that changes when a source in `folder` or below does."""
    files = [(str(path), path.stat()) for path in sorted(folder.rglob("*.py"))]
    return hash(tuple((len(name), state.st_mtime_ns, state.st_size) for name, state in files))


def compiled(function: Callable) -> Callable:
    """Decorator of a loop over NumPy arrays; without Numba it runs as Python, with the same results."""
    try:
        return jit(function, fastmath=False)
    except ImportError:
        return function
