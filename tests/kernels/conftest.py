"""Mends Triton's interpreter, in which kernels run where there is no GPU, so that it can run what a GPU can."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch


def _let_scalars_be_indices(interpreter: Any) -> None:
    # numpy 2.4 no longer turns an array of one element into an integer, as which the interpreter holds scalars.
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


def _multiply_bfloat16(interpreter: Any) -> None:
    # numpy has no bfloat16: the interpreter holds its bits as integers, and would multiply those.
    language = importlib.import_module("triton.language")
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != language.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, language.float32)

    def create_wide_dot(self: Any, left: Any, right: Any, *more: Any) -> Any:
        return create_dot(self, widened(left), widened(right), *more)

    interpreter.InterpreterBuilder.create_dot = create_wide_dot


def _round_to_float8(interpreter: Any) -> None:
    # The interpreter loses the carry of a mantissa that is rounded up to the next power of two.
    language = importlib.import_module("triton.language")
    create_fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_rounded(self: Any, source: Any, target: Any, *more: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (language.float32, language.float8e4nv):
            return create_fp_to_fp(self, source, target, *more)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(rounded.numpy().reshape(source.data.shape), target.scalar)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_rounded


def _patch_once_a_launch(interpreter: Any) -> None:
    # To run a kernel the interpreter replaces the functions of Triton's language. It does so again for each call of
    # a function within the kernel, which took two fifths of the time of all kernels.
    language = importlib.import_module("triton.language")
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        used = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if used <= patched:
            return None  # what would restore it is used by the launch alone
        patched.update(used)
        return patch(function)

    def execute_patched(self: Any, *arguments: Any, **more: Any) -> None:
        patched.clear()
        try:
            execute(self, *arguments, **more)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, execute_patched


_interpreter = importlib.import_module("triton.runtime.interpreter")
_let_scalars_be_indices(_interpreter)
_multiply_bfloat16(_interpreter)
_round_to_float8(_interpreter)
_patch_once_a_launch(_interpreter)


@pytest.fixture
def last_program_first(monkeypatch):
    """Runs the programs of a kernel in the interpreter from the last to the first."""
    builder = _interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def set_opposite(*index: int) -> None:
        set_index(*(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", set_opposite)
