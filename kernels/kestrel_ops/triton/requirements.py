"""What every kernel in Triton asks of a device and of the sizes it is called with."""

from __future__ import annotations

import torch

from kestrel_ops.shapes import FLOAT8, ModelShape

_WIDEST_ROW = 65_536
_WIDEST_HEAD = 128  # wider ones leave attention too few registers


def unsupported_device(model: ModelShape, *dtypes: torch.dtype) -> str | None:
    """Why the device cannot run kernels that read or write these types."""
    if FLOAT8 in dtypes:
        return model.lacks((8, 9), "float8 in Triton")
    return model.lacks((8, 0), "Triton")


def unsupported_rows(model: ModelShape) -> str | None:
    """Why rows of the model cannot be held by one program."""
    widest = max(model.widths, default=0)
    return f"rows of {widest} values are wider than {_WIDEST_ROW}" if widest > _WIDEST_ROW else None


def unsupported_heads(model: ModelShape) -> str | None:
    """Why attention heads of the text part cannot be held by one program."""
    if model.text is None or model.text.head_dim <= _WIDEST_HEAD:
        return None
    return f"heads of {model.text.head_dim} dimensions are wider than {_WIDEST_HEAD}"
