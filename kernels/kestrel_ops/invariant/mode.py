"""Makes plain torch code compute each row independently of the other rows of its batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_REFUSED = frozenset(
    {
        functional.scaled_dot_product_attention,
        functional.conv2d,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        torch.mm,
        Tensor.addmm,
        Tensor.mm,
    }
)
"""Their sums are in an order that depends on how many rows there are, and nothing here replaces them. `bmm` is not
among them, because `invariant_attention` uses it, with batches of one shape."""


_NUM_TRIED, _MANY_TRIED = 37, 300
"""Rows of a tried product. A CUDA device multiplies few and many rows by kernels of their own."""
_ALIGNED_BYTES = 16


class InvariantMode(TorchFunctionMode):
    """Makes the bits of a row follow from the row alone while it is entered, through these functions:

    - products (`linear` and matrices @ matrices) are the operation `invariant_linear`;
    - `gelu` and `sigmoid` run row by row on a CPU: torch computes what is left over from whole vectors in another
      way, and where that is depends on the number of rows;
    - `softmax` and `log_softmax` on other devices take rows of a multiple of 16 bytes, filled up: torch divides the
      sum of a row among threads by the place in memory at which it begins.

    Other products raise `NotImplementedError`. What else the models use (norms, softmax, exp, tanh, elementwise
    arithmetic) treats all rows alike already. It is of one thread, as every mode of torch.
    """

    def __init__(self, linear: Callable[..., Tensor]) -> None:
        """`linear` is the operation `invariant_linear`."""
        super().__init__()
        self._linear = linear
        self._replaced: dict[Any, Callable[..., Tensor]] = {
            functional.linear: linear,
            torch.matmul: self._matmul,
            Tensor.matmul: self._matmul,
            Tensor.__matmul__: self._matmul,
            functional.gelu: _by_row(functional.gelu),
            torch.sigmoid: _by_row(torch.sigmoid),
            Tensor.sigmoid: _by_row(torch.sigmoid),
            functional.softmax: _aligned(torch.softmax),
            torch.softmax: _aligned(torch.softmax),
            Tensor.softmax: _aligned(torch.softmax),
            functional.log_softmax: _aligned(torch.log_softmax),
            torch.log_softmax: _aligned(torch.log_softmax),
            Tensor.log_softmax: _aligned(torch.log_softmax),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED:
            raise NotImplementedError(f"{func} has no form that does not depend on the batch")
        replaced = self._replaced.get(func)
        return (func if replaced is None else replaced)(*args, **(kwargs or {}))

    def _matmul(self, rows: Tensor, matrix: Tensor) -> Tensor:
        if matrix.ndim != 2:
            raise NotImplementedError("only a product with one matrix has a form that does not depend on the batch")
        return self._linear(rows, matrix.mT.contiguous())


def depends_on_place(linear: Callable[..., Tensor], weight: Tensor) -> bool:
    """Returns True if a row's product with this matrix [out, in] depends on its place or on the other rows.

    Tries random rows, 37 or on a CUDA device 300, in order and shuffled, and the first 37 of them in smaller
    numbers, down to each alone.
    """
    generator = torch.Generator().manual_seed(_NUM_TRIED)
    num_rows = _NUM_TRIED if weight.device.type == "cpu" else _MANY_TRIED
    rows = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight)
    order = torch.randperm(num_rows, generator=generator).to(weight.device)
    together = linear(rows, weight)
    if not torch.equal(together[order], linear(rows[order], weight)):
        return True
    few, wanted = rows[:_NUM_TRIED], together[:_NUM_TRIED]
    return not all(
        torch.equal(torch.cat([linear(part, weight) for part in few.split(size)]), wanted)
        for size in (1, _NUM_TRIED)
    )


def depends_on_chunks(
    attention: Callable[..., Tensor],
    num_heads: int,
    key_pages: Tensor,  # [P, G, S, D] of any values, with at least two positions; written
    value_pages: Tensor,  # likewise
    dtype: torch.dtype,  # of queries
    scales: tuple[Tensor | None, Tensor | None],
) -> bool:
    """Returns True if `attention`, an `invariant_attention`, depends on how a prompt is divided into chunks.

    Tries it with one sequence, whose pages are all that are given, as a whole, in two chunks, and token by token.
    """
    device, head_dim = key_pages.device, key_pages.shape[3]
    num_pages, length = len(key_pages), len(key_pages) * key_pages.shape[2]
    generator = torch.Generator().manual_seed(_NUM_TRIED)
    for pages in (key_pages, value_pages):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    query = torch.randn(length, num_heads, head_dim, generator=generator).to(device, dtype)
    table = torch.randperm(num_pages, generator=generator).to(device, torch.int32)
    prefix = length // 3
    visible = torch.arange(1, length + 1, dtype=torch.int32, device=device).clamp(min=prefix)

    def attended(cuts: list[int]) -> Tensor:
        num_chunks = len(cuts) - 1
        bounds = torch.tensor(cuts, dtype=torch.int32, device=device)
        return attention(
            query[cuts[0] :],
            key_pages,
            value_pages,
            table.repeat(num_chunks, 1),
            bounds - cuts[0],
            bounds[1:].contiguous(),
            visible[cuts[0] :],
            max(end - start for start, end in itertools.pairwise(cuts)),
            *scales,
        )

    whole = attended([0, length])
    middle = (prefix + length) // 2
    return not (
        torch.equal(attended([0, middle, length]), whole)
        and torch.equal(attended([*range(prefix, length + 1)]), whole[prefix:])
    )


def _by_row(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(rows: Tensor, **options: Any) -> Tensor:
        if rows.device.type != "cpu" or rows.ndim < 2 or not rows.numel():
            return function(rows, **options)
        return torch.stack([function(row, **options) for row in rows.flatten(0, -2)]).unflatten(0, rows.shape[:-1])

    return apply


def _aligned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(rows: Tensor, dim: int, dtype: torch.dtype | None = None, **_: int) -> Tensor:
        assert dim in (-1, rows.ndim - 1), "only rows are known to be independent"
        missing = -rows.shape[-1] % (_ALIGNED_BYTES // rows.dtype.itemsize)
        if rows.device.type == "cpu" or not missing:
            return function(rows, dim, dtype=dtype)
        filled = functional.pad(rows, (0, missing), value=float("-inf"))
        return function(filled, dim, dtype=dtype)[..., : rows.shape[-1]].contiguous()

    return apply
