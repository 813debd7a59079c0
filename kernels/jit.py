"""Loops over NumPy arrays that Numba compiles where it is installed; without it they run as Python, with the same results."""

from collections.abc import Callable


def compiled(function: Callable) -> Callable:
    """Decorator."""
    try:
        from numba import njit
    except ImportError:
        return function
    return njit(cache=True, error_model="numpy", fastmath=False)(function)
