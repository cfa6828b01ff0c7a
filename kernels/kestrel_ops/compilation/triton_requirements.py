"""Requirements of all Triton kernels on the device and on sizes."""

from __future__ import annotations

import torch

from kestrel_ops.shapes import FLOAT8, ModelShape

_WIDEST_ROW = 65_536
_WIDEST_HEAD = 128  # wider heads need too many registers in attention


def unsupported_device(model: ModelShape, *dtypes: torch.dtype) -> str | None:
    """Returns why the device cannot run kernels with these types; None if it can."""
    if FLOAT8 in dtypes:
        return model.lacks((8, 9), "float8 in Triton")
    return model.lacks((8, 0), "Triton")


def unsupported_rows(model: ModelShape) -> str | None:
    """Returns why one program cannot hold a row of the model; None if it can."""
    widest = max(model.widths, default=0)
    return f"rows of {widest} values are wider than {_WIDEST_ROW}" if widest > _WIDEST_ROW else None


def unsupported_heads(model: ModelShape) -> str | None:
    """Returns why one program cannot hold an attention head of the text part; None if it can."""
    if model.text is None or model.text.head_dim <= _WIDEST_HEAD:
        return None
    return f"heads of {model.text.head_dim} dimensions are wider than {_WIDEST_HEAD}"
