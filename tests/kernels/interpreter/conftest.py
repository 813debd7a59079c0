"""Kernels under Triton's interpreter. The switch has to be set before Triton is imported and cannot be undone in a process,
so these tests are collected only in a process started for them: `TRITON_INTERPRET=1 pytest tests/kernels/interpreter`.
"""

import inspect
import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _prepared_once_a_launch():
    """Half of the interpreter's time goes into preparing `triton.language`, anew for every call of a device function.

    Here a launch does it once for each set of modules that its functions know the language by. Doing it again changes
    nothing: what is replaced already is not a builtin any more.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    prepare, prepared = interpreter._patch_lang, {}

    def prepare_once(function):
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        names = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
        if names in prepared:
            return None
        first, scope = not prepared, prepare(function)
        prepared[names] = scope
        if first and scope is not None:  # the launch itself, which undoes it at its end
            undo = scope.restore

            def restore():
                prepared.clear()
                undo()

            scope.restore = restore
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def row_invariant_dot(monkeypatch):
    """Make the interpreter's `tl.dot` sum each output element in one order, as a tensor core does.

    The interpreter multiplies tiles with NumPy's BLAS, whose rounding of a row depends on the row's place in the tile. That
    is no property of the kernel, so tests of bits replace it; the `gpu` twins of these tests run on the hardware as it is.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        return TensorHandle(np.einsum("mk,kn->mn", left, right, optimize=False) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
