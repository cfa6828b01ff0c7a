"""Computes a linear layer whose row has the same bits among any number of rows, by cuBLASLt where that gives
Triton's bits.

Tensor cores add up a sum that is not divided among programs in the order of its columns, whatever the kernel. So
cuBLASLt is asked for algorithms that divide no sum. For each size of matrix and range of numbers of rows, those
that give the bits of `invariant_product` on random rows are eligible, and the fastest of them serves the range.
Where there is none, `invariant_product` serves.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import only_compiles
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.invariant.triton_invariant_product import invariant_product
from kestrel_ops.linear.library_cublas_lt import CublasLt, OrderedProduct, cublas_lt, time_ms
from kestrel_ops.shapes import ModelShape

LAUNCHES_TRITON = True
_RANGES = (1, 16, 64, 128, 256, 512, 1024, 4096)
"""Numbers of rows at which a range ends; the last one has no end, and is tried with this number."""
_ALIGNMENT = 16  # bytes, for which algorithms are chosen
_SEED = 37


def invariant_linear(
    rows: Tensor,  # [..., in]
    weight: Tensor,  # [out, in], of the type of `rows`, contiguous
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [..., out]
    """Computes a linear layer whose rows have the same bits in any batch; sums are float32.

    Same contract as `reference.invariant_linear`, up to rounding.

    The first call for a range of numbers of rows waits for the device, unless the stream is being captured: then
    Triton serves.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    prepared = None if only_compiles() or not flat.is_cuda else _algorithms().of(flat, weight, bias)
    if prepared is None:
        out = invariant_product(flat, weight, bias)
    else:
        out = torch.empty(len(flat), len(weight), dtype=flat.dtype, device=flat.device)
        cublas_lt().add_in_order(prepared, flat, weight, bias, out)
    return out.view(*rows.shape[:-1], len(weight))


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_device(model, model.dtype)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Products for which one algorithm is chosen."""

    num_out: int
    width: int
    dtype: torch.dtype
    device: torch.device
    has_bias: bool
    range: int


class _Algorithms:
    """Describes the algorithms that were chosen so far, and their prepared products for numbers of rows."""

    def __init__(self) -> None:
        self._chosen: dict[_Kind, OrderedProduct | None] = {}
        self._of_rows: dict[tuple[_Kind, int], OrderedProduct] = {}

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> OrderedProduct | None:
        """Returns the prepared product for a product; None where cuBLASLt is not to serve it."""
        num_rows, width = rows.shape
        if not num_rows or not _is_aligned(rows, weight, bias):
            return None
        number = min(bisect_left(_RANGES, num_rows), len(_RANGES) - 1)
        kind = _Kind(len(weight), width, rows.dtype, rows.device, bias is not None, number)
        prepared = self._of_rows.get((kind, num_rows))
        if prepared is not None:
            return prepared
        if kind not in self._chosen:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._chosen[kind] = _choose(kind, weight, bias)
        chosen = self._chosen[kind]
        if chosen is None:
            return None
        return self._of_rows.setdefault((kind, num_rows), cublas_lt().for_rows(chosen, num_rows))


@functools.cache
def _algorithms() -> _Algorithms:
    return _Algorithms()


def _is_aligned(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if rows.dtype not in (torch.bfloat16, torch.float16) or torch.version.hip:
        return False
    operands = [rows, weight] if bias is None else [rows, weight, bias]
    step = _ALIGNMENT // rows.dtype.itemsize
    return (
        all(operand.is_contiguous() and operand.data_ptr() % _ALIGNMENT == 0 for operand in operands)
        and all(operand.dtype == rows.dtype for operand in operands)
        and weight.shape[0] % step == weight.shape[1] % step == 0
    )


def _choose(kind: _Kind, weight: Tensor, bias: Tensor | None) -> OrderedProduct | None:
    """Returns the fastest algorithm with the bits of Triton's product, at both ends of a range of numbers of
    rows."""
    fewest, most = 1 + _RANGES[kind.range - 1] if kind.range else 1, _RANGES[kind.range]
    try:
        library = cublas_lt()
        generator = torch.Generator(kind.device).manual_seed(_SEED)
        rows = torch.randn(most, kind.width, generator=generator, device=kind.device, dtype=kind.dtype)
        wanted = invariant_product(rows, weight, bias)
        best, best_ms = None, float("inf")
        for prepared in library.ordered_candidates(most, weight, bias):
            own = torch.empty_like(wanted)
            if _agrees(library, prepared, rows, weight, bias, own, wanted) and _agrees(
                library,
                library.for_rows(prepared, fewest),
                rows[:fewest],
                weight,
                bias,
                own[:fewest],
                wanted[:fewest],
            ):
                own_ms = time_ms(functools.partial(library.add_in_order, prepared, rows, weight, bias, own))
                if own_ms < best_ms:
                    best, best_ms = prepared, own_ms
    except (OSError, torch.OutOfMemoryError):
        return None
    return best


def _agrees(
    library: CublasLt,
    prepared: OrderedProduct,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    wanted: Tensor,
) -> bool:
    try:
        library.add_in_order(prepared, rows, weight, bias, out)
    except RuntimeError:  # some algorithms that the heuristic lists do not run
        return False
    return torch.equal(out.view(torch.int16), wanted.view(torch.int16))
