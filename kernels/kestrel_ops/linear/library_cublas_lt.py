"""Calls products of cuBLASLt that torch does not expose: those with a GELU or a residual addition, and those whose
sums are not divided.

Uses the library that torch has loaded. cuBLASLt stores matrices by columns, so it sees every matrix transposed:
out.T [N, T] = weight [N, K] @ x.T [K, T].
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kestrel_ops.shapes import ModelShape, has_float8_product

# cudaDataType
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F
# cublasLtMatmulDescAttributes_t
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS = 3, 4, 7, 8
_SCALE_A, _SCALE_B, _SCALE_D, _FAST_ACCUMULATION, _BIAS_TYPE = 17, 18, 20, 25, 26
# cublasLtEpilogue_t
_NOTHING, _ADD_BIAS, _ADD_BIAS_THEN_GELU = 1, 4, 36
_MOST_WORKSPACE_BYTES, _REDUCTION_SCHEMES = 1, 3  # cublasLtMatmulPreferenceAttributes_t
_NO_REDUCTION = 0  # cublasLtReductionScheme_t
_WORKSPACE_BYTES = 32 << 20
_MOST_CANDIDATES = 8
_ALIGNMENT = 16  # bytes
_NUM_TIMED_RUNS, _NUM_ROUNDS = 3, 2
_BYTES_AHEAD, _TIMES_AHEAD = 256 << 20, 2  # 0.16 ms on an H200
_WITHOUT_LARGEST_EXPONENT_BIT = 0b10111111
_SEED = 1
_WORTH_A_CHANGE = 0.98  # relative to the time of the first candidate
_choices: ContextVar[dict[str, int] | None] = ContextVar("_choices", default=None)
"""Within `measured_products`: which candidate is the fastest for a shape."""

_SIGNATURES = {
    "cublasLtCreate": [c_void_p],
    "cublasLtMatmulDescCreate": [c_void_p, c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, c_void_p, c_void_p],
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


class _Heuristic(ctypes.Structure):
    # cublasLtMatmulHeuristicResult_t
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class _PreparedProduct:
    """Describes one shape of product: the layouts of its operands and an algorithm."""

    description: c_void_p
    weight: c_void_p
    x: c_void_p
    added: c_void_p
    out: c_void_p
    heuristic: _Heuristic


@dataclass(frozen=True, slots=True)
class OrderedProduct:
    """Describes a product that divides no sum, for one number of rows."""

    prepared: _PreparedProduct
    out_dim: int
    in_dim: int
    dtype: torch.dtype


class CublasLt:
    """Holds a handle of the library and the products prepared so far. For one thread at a time."""

    def __init__(self) -> None:
        """Raises OSError if torch was built without CUDA."""
        version = torch.version.cuda
        if version is None:
            raise OSError("this torch was built without CUDA")
        # A call takes less time than releasing and acquiring the interpreter's lock.
        self._library = ctypes.PyDLL(f"libcublasLt.so.{version.split('.')[0]}")
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, c_int
        self._library.cublasLtGetStatusString.argtypes = [c_int]
        self._library.cublasLtGetStatusString.restype = ctypes.c_char_p
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._prepared: dict[tuple[object, ...], _PreparedProduct] = {}
        self._measured: set[tuple[object, ...]] = set()

    def multiply(
        self,
        x: Tensor,  # [T, K] float8_e4m3fn, bfloat16 or float16, contiguous
        x_scale: Tensor | None,  # [1] float32 where `x` is float8
        weight: Tensor,  # [N, K], of the type of `x`, contiguous
        weight_scale: Tensor | None,  # [1] float32 where `weight` is float8
        bias: Tensor,  # [N] bfloat16 or float16
        out: Tensor,  # [T, N], float8_e4m3fn or the type of `bias`, contiguous
        *,
        out_factor: Tensor | None = None,  # [1] float32, where `out` is float8
        gelu: bool = False,
        accumulate: bool = False,
    ) -> None:
        """Computes out = out_factor * gelu((x * x_scale) @ (weight * weight_scale).T + bias), or out += with
        `accumulate`.

        Within `measured_products`, at the first call for a shape that has no choice, it measures which algorithm is
        the fastest, and synchronises for that. Else the library's first choice is used. Raises RuntimeError if
        cuBLASLt has no such product.
        """
        assert x.is_contiguous()
        assert weight.is_contiguous()
        assert out.is_contiguous()
        # An algorithm is selected for operands with this alignment and used for all operands of the shape.
        assert all(operand.data_ptr() % _ALIGNMENT == 0 for operand in (x, weight, out, bias))

        key = (*x.shape, len(weight), x.dtype, out.dtype, bias.dtype, gelu, accumulate)
        prepared, choices = self._prepared.get(key), None if key in self._measured else _choices.get()
        chosen = None if choices is None else choices.get(repr(key))
        measures = choices is not None and chosen is None and not torch.cuda.is_current_stream_capturing()
        if prepared is None or chosen is not None or measures:
            # The selection depends on alignment, so the prepared product uses the actual operands.
            candidates = self._candidates(x, x_scale, weight, weight_scale, bias, out, out_factor, gelu)
            if choices is not None and measures:
                chosen = choices[repr(key)] = self._fastest(candidates, x, weight, bias, out, accumulate)
            if chosen is not None:
                self._measured.add(key)
            prepared = self._prepared[key] = candidates[min(chosen or 0, len(candidates) - 1)]
        self._set_pointers(prepared.description, x_scale, weight_scale, bias, out_factor)
        self._run(prepared, x, weight, out, accumulate)

    def ordered_candidates(self, num_rows: int, weight: Tensor, bias: Tensor | None) -> list[OrderedProduct]:
        """Algorithms for x @ weight.T + bias, in the types of the weight, that divide no sum among programs.

        All operands are contiguous and aligned to 16 bytes. The list may be empty.
        """
        out_dim, in_dim = weight.shape
        description = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(description), _COMPUTE_FLOAT32, _TYPES[torch.float32])
        self._set(description, _TRANSPOSE_A, c_int32(1))
        self._set(description, _TRANSPOSE_B, c_int32(0))
        self._set(description, _EPILOGUE, c_int32(_NOTHING if bias is None else _ADD_BIAS))
        if bias is not None:
            self._set(description, _BIAS_TYPE, c_int32(_TYPES[bias.dtype]))
            self._set(description, _BIAS, c_void_p(bias.data_ptr()))
        weight_layout = self._layout(weight.dtype, in_dim, out_dim)
        x_layout, out_layout = (self._layout(weight.dtype, width, num_rows) for width in (in_dim, out_dim))
        layouts = (weight_layout, x_layout, out_layout, out_layout)
        return [
            OrderedProduct(_PreparedProduct(description, *layouts, heuristic), out_dim, in_dim, weight.dtype)
            for heuristic in self._heuristics(description, layouts, reduces=False)
        ]

    def for_rows(self, ordered: OrderedProduct, num_rows: int) -> OrderedProduct:
        """Returns the same algorithm for another number of rows."""
        out = self._layout(ordered.dtype, ordered.out_dim, num_rows)
        x = self._layout(ordered.dtype, ordered.in_dim, num_rows)
        return replace(ordered, prepared=replace(ordered.prepared, x=x, added=out, out=out))

    def add_in_order(
        self, ordered: OrderedProduct, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """Computes out = x @ weight.T + bias. Raises RuntimeError if the algorithm does not run."""
        if bias is not None:
            self._set(ordered.prepared.description, _BIAS, c_void_p(bias.data_ptr()))
        self._run(ordered.prepared, x, weight, out, accumulate=False)

    def _run(self, prepared: _PreparedProduct, x: Tensor, weight: Tensor, out: Tensor, accumulate: bool) -> None:
        workspace = torch.empty(prepared.heuristic.workspace_bytes, dtype=torch.uint8, device=x.device)
        self._call(
            "cublasLtMatmul",
            self._handle,
            prepared.description,
            byref(c_float(1.0)),
            weight.data_ptr(),
            prepared.weight,
            x.data_ptr(),
            prepared.x,
            byref(c_float(1.0 if accumulate else 0.0)),
            # A matrix that is input and output must have one layout, but a float8 output and its addend differ in
            # type.
            out.data_ptr() if accumulate else None,
            prepared.added,
            out.data_ptr(),
            prepared.out,
            byref(prepared.heuristic),
            workspace.data_ptr(),
            prepared.heuristic.workspace_bytes,
            torch.cuda.current_stream(x.device).cuda_stream,
        )

    def _fastest(
        self,
        candidates: list[_PreparedProduct],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        out: Tensor,
        accumulate: bool,
    ) -> int:
        """Returns the index of the fastest candidate with the bits of the first, for operands like these with
        values of its own. Waits for the device.
        """
        first, *others = candidates
        if not others:
            return 0
        scale = torch.ones(1, device=x.device) if x.dtype == torch.float8_e4m3fn else None
        factor = scale if out.dtype == torch.float8_e4m3fn else None
        best = 0
        try:
            x, weight, bias = _random_like(x), _random_like(weight), torch.zeros_like(bias)

            def run(prepared: _PreparedProduct, out: Tensor) -> None:
                self._set_pointers(prepared.description, scale, scale, bias, factor)
                self._run(prepared, x, weight, out, accumulate)

            wanted, timed = torch.zeros_like(out), torch.zeros_like(out)
            run(first, wanted)
            best_ms = _WORTH_A_CHANGE * time_ms(partial(run, first, timed))
            for number, prepared in enumerate(others, 1):
                own = torch.zeros_like(out)
                try:
                    run(prepared, own)
                except RuntimeError:  # some algorithms that the heuristic lists do not run
                    continue
                if torch.equal(own.view(torch.uint8), wanted.view(torch.uint8)):
                    own_ms = time_ms(partial(run, prepared, timed))
                    if own_ms < best_ms:
                        best, best_ms = number, own_ms
        except torch.OutOfMemoryError:
            return 0
        return best

    def _candidates(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor,
        out: Tensor,
        out_factor: Tensor | None,
        gelu: bool,
    ) -> list[_PreparedProduct]:
        """Returns the algorithms for a product, in the order in which cuBLASLt prefers them."""
        (num_rows, in_dim), out_dim = x.shape, len(weight)
        description = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(description), _COMPUTE_FLOAT32, _TYPES[torch.float32])
        self._set(description, _TRANSPOSE_A, c_int32(1))
        self._set(description, _TRANSPOSE_B, c_int32(0))
        self._set(description, _EPILOGUE, c_int32(_ADD_BIAS_THEN_GELU if gelu else _ADD_BIAS))
        self._set(description, _BIAS_TYPE, c_int32(_TYPES[bias.dtype]))
        if x_scale is not None:
            self._set(description, _FAST_ACCUMULATION, c_int8(1))
        self._set_pointers(description, x_scale, weight_scale, bias, out_factor)
        weight_layout = self._layout(weight.dtype, in_dim, out_dim)
        x_layout = self._layout(x.dtype, in_dim, num_rows)
        added_layout = self._layout(bias.dtype, out_dim, num_rows)  # the addend is never float8
        out_layout = self._layout(out.dtype, out_dim, num_rows)
        layouts = (weight_layout, x_layout, added_layout, out_layout)
        candidates = [
            _PreparedProduct(description, *layouts, heuristic)
            for heuristic in self._heuristics(description, layouts)
        ]
        if not candidates:
            raise RuntimeError(
                f"cuBLASLt has no product of {tuple(x.shape)} and {tuple(weight.shape)} in {out.dtype}"
            )
        return candidates

    def _heuristics(
        self,
        description: c_void_p,
        layouts: tuple[c_void_p, c_void_p, c_void_p, c_void_p],  # of the weight, the input, the addend, the output
        *,
        reduces: bool = True,
    ) -> list[_Heuristic]:
        """Algorithms for a product in the order in which cuBLASLt prefers them.

        Without `reduces` none of them divides a sum among programs.
        """
        preference, num_found, found = c_void_p(), c_int(), (_Heuristic * _MOST_CANDIDATES)()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        wanted: list[tuple[int, ctypes._SimpleCData[Any]]] = [(_MOST_WORKSPACE_BYTES, c_uint64(_WORKSPACE_BYTES))]
        if not reduces:
            wanted.append((_REDUCTION_SCHEMES, c_uint32(_NO_REDUCTION)))
        for attribute, value in wanted:
            self._call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value), sizeof(value))
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            description,
            *layouts,
            preference,
            _MOST_CANDIDATES,
            byref(found),
            byref(num_found),
        )
        return list(found[: num_found.value])

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call("cublasLtMatrixLayoutCreate", byref(layout), _TYPES[dtype], rows, columns, rows)
        return layout

    def _set_pointers(
        self,
        description: c_void_p,
        x_scale: Tensor | None,
        weight_scale: Tensor | None,
        bias: Tensor,
        out_factor: Tensor | None,
    ) -> None:
        pointers = ((_SCALE_A, weight_scale), (_SCALE_B, x_scale), (_BIAS, bias), (_SCALE_D, out_factor))
        for attribute, tensor in pointers:
            if tensor is not None:
                self._set(description, attribute, c_void_p(tensor.data_ptr()))

    def _set(self, description: c_void_p, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        self._call("cublasLtMatmulDescSetAttribute", description, attribute, byref(value), sizeof(value))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            message = self._library.cublasLtGetStatusString(status).decode()
            raise RuntimeError(f"{name} failed: {message}")


def time_ms(run: Callable[[], None]) -> float:
    """Returns the time of a few runs on the current stream. Waits for the device.

    Where there is memory for it, the device is kept busy while they are launched: short ones would wait for that.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ahead, best_ms = None, float("inf")
    with suppress(torch.OutOfMemoryError):
        ahead = torch.empty(_BYTES_AHEAD, dtype=torch.uint8, device="cuda")
    for _ in range(_NUM_ROUNDS):
        for _ in range(_TIMES_AHEAD if ahead is not None else 0):
            ahead.zero_()
        begin.record()
        for _ in range(_NUM_TIMED_RUNS):
            run()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return best_ms


def _random_like(operand: Tensor) -> Tensor:
    """Returns finite values of an operand's shape and type: those of float8 are between -2 and 2."""
    generator = torch.Generator(operand.device).manual_seed(_SEED)
    if operand.dtype != torch.float8_e4m3fn:
        return torch.randn(operand.shape, generator=generator, dtype=operand.dtype, device=operand.device)
    number = torch.randint(0, 256, operand.shape, generator=generator, dtype=torch.uint8, device=operand.device)
    return number.bitwise_and_(_WITHOUT_LARGEST_EXPONENT_BIT).view(operand.dtype)


@contextmanager
def measured_products(choices: dict[str, int]) -> Iterator[None]:
    """Chooses algorithms by measurement, see `kestrel_ops.measured_products`."""
    token = _choices.set(choices)
    try:
        yield
    finally:
        _choices.reset(token)


@functools.cache
def cublas_lt() -> CublasLt:
    """Returns the handle of this process. Raises OSError if torch was built without CUDA."""
    return CublasLt()


def unsupported_fixed_scales(model: ModelShape) -> str | None:
    """Returns why the vision part of a model cannot use float8 products with a GELU or an addition; None if it
    can."""
    vision = model.vision
    if vision is None or not vision.has_fixed_scales:
        return None
    if not has_float8_product(vision.dim, vision.ff_dim):
        return f"float8 products need multiples of 16, not {vision.dim} and {vision.ff_dim}"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"cuBLASLt adds float8 products to bfloat16 or float16, not to {model.dtype}"
    return model.lacks((8, 9), "a float8 product")
