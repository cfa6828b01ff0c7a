"""Lays out contexts in pages as FlashInfer takes them, and checks that it can be used.

FlashInfer plans on the host how it divides a batch, before the kernels of a step. The lengths of the contexts are
on the device, so a plan waits for it, and no CUDA graph captures it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kestrel_ops.shapes import FLOAT8, ModelShape

VERSIONS = ("0.7.4",)
"""Versions of flashinfer-python that the extra `flashinfer` installs."""
WORKSPACE_BYTES = 128 * 2**20
"""Memory of each operation for parts of contexts: the size that FlashInfer recommends."""
USES_DEPENDENT_LAUNCH = False
"""The setting of FlashInfer's calls: our kernels rely on what those before them have waited for (rule 6 of
kernels/README.md)."""
_DISTRIBUTION = "flashinfer-python"
_HEAD_DIMS = (64, 128, 256)
_SHORT = (torch.bfloat16, torch.float16)


class PagedContexts(NamedTuple):
    """Contexts of B sequences in pages; int32 on the host."""

    starts: Tensor
    """[B + 1]: the first of each sequence's pages among all pages."""
    pages: Tensor
    """[all pages of the sequences]."""
    last_lengths: Tensor
    """[B]: positions in each sequence's last page, from 1 to the size of a page."""

    @classmethod
    def of(cls, page_table: Tensor, lengths: Tensor, page_size: int) -> PagedContexts:
        """Returns the contexts of the rows of a page table [B, most pages], each of at least one position.

        All are int32 and on the host; lengths: [B].
        """
        counts = (lengths + page_size - 1) // page_size
        is_own = torch.arange(page_table.shape[1]) < counts[:, None]
        return cls(sums_from_zero(counts), page_table[is_own], lengths - (counts - 1) * page_size)


def sums_from_zero(counts: Tensor) -> Tensor:
    """Returns where each of so many follows those before it, [B + 1] int32; counts: [B]."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


class StepOfPlan:
    """Remembers the step that a plan was made for.

    All layers of a step pass the same tensors, at least one of which, the page table, is made for the step. Another
    tensor is another step, or another part of one.
    """

    def __init__(self) -> None:
        self._tensors: tuple[weakref.ref[Tensor], ...] = ()

    def is_of(self, *tensors: Tensor) -> bool:
        """Returns True if the plan was made for these tensors."""
        return len(tensors) == len(self._tensors) and all(
            known() is tensor for known, tensor in zip(self._tensors, tensors, strict=True)
        )

    def set_to(self, *tensors: Tensor) -> None:
        """Remembers that the plan was made for these tensors."""
        self._tensors = tuple(map(weakref.ref, tensors))


def flashinfer() -> Any:
    """Returns the library, whose import takes seconds."""
    return importlib.import_module("flashinfer")


def workspace(device: torch.device) -> Tensor:
    """Returns new memory for the parts of contexts, [bytes] uint8 of zeros, as FlashInfer asks for at first."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _missing() -> str | None:
    """Returns why the library cannot be used in this installation; None if it can."""
    try:
        version = importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"{_DISTRIBUTION} is not installed; the extra `flashinfer` installs it"
    if version not in VERSIONS:
        return f"{_DISTRIBUTION} {version} is not supported; the extra `flashinfer` installs {', '.join(VERSIONS)}"
    return None


def unsupported_attention(model: ModelShape, query_dtype: torch.dtype) -> str | None:
    """Returns why FlashInfer cannot compute attention of queries of a type for a model, or None if it can."""
    text = model.text
    if text is None:
        return None
    if model.device_type != "cuda":
        return "FlashInfer needs a CUDA device"
    reason = model.lacks((8, 9), "FlashInfer with float8 pages") if text.cache_dtype == FLOAT8 else None
    reason = reason or model.lacks((8, 0), "FlashInfer")
    if reason is not None:
        return reason
    if query_dtype not in _SHORT:
        return f"FlashInfer takes bfloat16 and float16, not {query_dtype}"
    if text.cache_dtype not in (query_dtype, FLOAT8):
        return (
            f"FlashInfer takes pages of the type of the queries, {query_dtype}, or float8, not {text.cache_dtype}"
        )
    if text.head_dim not in _HEAD_DIMS:
        return f"FlashInfer takes heads of 64, 128 or 256 dimensions, not {text.head_dim}"
    return _missing()
