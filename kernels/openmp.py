"""PyTorch's own threads for our loops: a second pool of threads would fight the first for the cores."""

import ctypes
from array import array
from functools import cache
from typing import NamedTuple

import torch


class Team(NamedTuple):
    """Of the OpenMP library that PyTorch runs on: `parallel(body, argument, threads, flags)` calls `body(argument)` in each of
    up to so many threads; the addresses are of functions that return a thread's number and how many there are.
    """

    parallel: ctypes._CFuncPtr
    number_at: int
    count_at: int


@cache
def team() -> Team | None:
    """None where there is no such library, or one of another make (macOS); loops then run in the calling thread."""
    try:
        loaded = ctypes.CDLL(None)  # all that PyTorch has loaded for everyone
        parallel, *asked = loaded.GOMP_parallel, loaded.omp_get_thread_num, loaded.omp_get_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return Team(parallel, *(ctypes.cast(function, ctypes.c_void_p).value for function in asked))


def run(body_at: int, numbers: list[int], alone: bool = False) -> None:
    """Call the compiled `body(int64 *)` at an address in each of PyTorch's threads, or once. It gets the numbers, and two
    addresses more, for `thread_in_team`.
    """
    workers = None if alone or torch.get_num_threads() == 1 else team()
    number_at, count_at = (0, 0) if workers is None else workers[1:]
    argument = array("q", [*numbers, number_at, count_at])
    if workers is None:
        _BODY(body_at)(argument.buffer_info()[0])
    else:
        workers.parallel(body_at, argument.buffer_info()[0], torch.get_num_threads(), 0)


_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
