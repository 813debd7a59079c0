"""Loops that Numba compiles where it is installed."""

from collections.abc import Callable


def jit(function: Callable, **options) -> Callable:
    """`numba.njit`, its code kept beside the source or in the user's cache folder, and nowhere if neither can be written."""
    from numba import njit

    try:
        return njit(cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # a read-only installation and no home
        return njit(error_model="numpy", **options)(function)


def compiled(function: Callable) -> Callable:
    """Decorator of a loop over NumPy arrays; without Numba it runs as Python, with the same results."""
    try:
        return jit(function, fastmath=False)
    except ImportError:
        return function
