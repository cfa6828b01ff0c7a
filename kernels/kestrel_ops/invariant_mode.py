"""Makes plain torch code compute each row independently of the other rows of its batch."""

from __future__ import annotations

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


class InvariantMode(TorchFunctionMode):
    """While it is entered, the bits of a row follow from the row alone, through these functions:

    - products (`linear` and matrices @ matrices) are the operation `invariant_linear`;
    - `gelu` and `sigmoid` run row by row on a CPU: torch computes what is left over from whole vectors in another
      way, and where that is depends on the number of rows.

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
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED:
            raise NotImplementedError(f"{func} has no form that does not depend on the batch")
        replaced = self._replaced.get(func)
        return (func if replaced is None else replaced)(*args, **(kwargs or {}))

    def _matmul(self, rows: Tensor, matrix: Tensor) -> Tensor:
        if matrix.ndim != 2:
            raise NotImplementedError("only a product with one matrix has a form that does not depend on the batch")
        return self._linear(rows, matrix.mT)


def depends_on_place(linear: Callable[..., Tensor], weight: Tensor) -> bool:
    """Whether a row's product with this matrix [out, in] depends on where the row is and what is beside it.

    Tried with 37 random rows, in order and shuffled, and each in turn with nothing beside it.
    """
    generator = torch.Generator().manual_seed(37)
    rows = torch.randn(37, weight.shape[1], generator=generator).to(weight)
    order = torch.randperm(len(rows), generator=generator).to(weight.device)
    together = linear(rows, weight)
    alone = torch.cat([linear(row[None], weight) for row in rows])
    return not (torch.equal(together[order], linear(rows[order], weight)) and torch.equal(together, alone))


def _by_row(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(rows: Tensor, **options: Any) -> Tensor:
        if rows.device.type != "cpu" or rows.ndim < 2 or not rows.numel():
            return function(rows, **options)
        return torch.stack([function(row, **options) for row in rows.flatten(0, -2)]).unflatten(0, rows.shape[:-1])

    return apply
