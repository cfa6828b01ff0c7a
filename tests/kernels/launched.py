"""Calls of the operations in Triton with tensors of any values, for those who look at what they launch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def _triton(operation: str) -> Any:
    return getattr(import_module(f"kestrel_ops.triton.{operation}"), operation)


def _empty(*shape: int, dtype: str = "fp32") -> Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype])


def add_layer_norm(count: int, width: int, delta: str, out: str) -> None:
    """`count` float32 rows with a delta of another type."""
    operation = _triton("add_layer_norm")
    operation(_empty(count, width), _empty(count, width, dtype=delta), 1e-5, _DTYPES[out])


def rotary_write_kv(heads: int, groups: int, head_dim: int, dtype: str, pages: str, has_factors: bool) -> None:
    """Three tokens whose heads turn by half of their lanes."""
    room = _empty(2, groups, 16, head_dim, dtype=pages)
    angles, scale = _empty(64, head_dim // 4), _empty(1) if pages == "fp8" else None
    factors = (_empty(3, heads, dtype=dtype), _empty(3, groups, dtype=dtype)) if has_factors else (None, None)
    qkv = _empty(3, (heads + 2 * groups) * head_dim, dtype=dtype)
    numbers = torch.zeros(3, dtype=torch.int64)
    _triton("rotary_write_kv")(qkv, numbers, angles, angles, room, room.clone(), numbers, scale, scale, *factors)
