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


def decode_contract(batch: int, width: int, num_rows: int, weight: str) -> None:
    """`batch` tokens, whose activations are float16 where the weight is float8."""
    scale = _empty(num_rows) if weight == "fp8" else None
    activations = _empty(batch, width, dtype="fp16" if weight == "fp8" else weight)
    _triton("decode_contract")(
        activations, _empty(num_rows, width, dtype=weight), scale, _empty(num_rows), _empty(batch, num_rows)
    )


def decode_expand(batch: int, width: int, num_plain: int, num_activated: int, weight: str, num_shares: int) -> None:
    """`batch` tokens, with so many shares pending."""
    num_rows, out = num_plain + num_activated, "fp16" if weight == "fp8" else weight
    _triton("decode_expand")(
        _empty(batch, width),
        _empty(num_rows, width, dtype=weight),
        _empty(num_rows) if weight == "fp8" else None,
        _empty(num_rows),
        _empty(num_rows),
        1e-5,
        num_plain,
        _empty(batch, num_plain, dtype=out),
        _empty(batch, num_activated, dtype=out),
        _empty(num_shares, batch, width) if num_shares else None,
    )
