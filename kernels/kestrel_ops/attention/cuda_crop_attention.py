"""Computes attention within crops on Hopper. Keys and values of a head are in shared memory without padding."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kestrel_ops.attention.library_crop_attention import crop_attention as library_crop_attention
from kestrel_ops.compilation.cuda_program import Program, compile_together
from kestrel_ops.device_limits import HOPPER_SHARED_BYTES, DeviceLimits
from kestrel_ops.shapes import ModelShape

_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_HOPPER, _ARCHITECTURE = (9, 0), "sm_90a"
# The fastest sizes for heads of 72 dimensions, among those that fit into the registers of a multiprocessor.
_TILE, _WARPGROUPS, _WIDEST_HEAD = 96, 3, 80
# Pieces of one row must be in different banks.
_PAD_BYTES = 16

_log = logging.getLogger(__name__)


def crop_attention(
    packed: Tensor,  # [N * patches, 3 * H * D]: queries, keys and values side by side
    num_patches: int,
    num_heads: int,
    out_scale: float | None = None,
    crop_by_crop: bool = False,
) -> Tensor:  # [N * patches, H * D] in the type of `packed`, or float8_e4m3fn with an `out_scale`
    """Computes attention within each crop.

    Same contract as `reference.crop_attention`. The library serves sizes, types and devices that the kernel does
    not support.

    The kernel computes each head of a crop by itself, so `crop_by_crop` concerns the library alone.
    """
    head_dim = packed.shape[1] // (3 * num_heads)
    program = _program(packed.device, packed.dtype, num_patches, num_heads, head_dim, out_scale is not None)
    if program is None:
        return library_crop_attention(packed, num_patches, num_heads, out_scale, crop_by_crop)
    assert packed.is_contiguous()
    assert packed.data_ptr() % 16 == 0  # bytes of one load
    out = torch.empty(
        len(packed),
        num_heads * head_dim,
        dtype=packed.dtype if out_scale is None else torch.float8_e4m3fn,
        device=packed.device,
    )
    all_heads = len(packed) // num_patches * num_heads
    num_rounds = all_heads * math.ceil(num_patches / (64 * _WARPGROUPS))
    program.launch(
        min(num_rounds, torch.cuda.get_device_properties(packed.device).multi_processor_count),
        (_WARPGROUPS + 1) * 128,
        c_void_p(packed.data_ptr()),
        c_void_p(out.data_ptr()),
        c_int(all_heads),
        c_float(head_dim**-0.5 * math.log2(math.e)),
        c_float(1.0 if out_scale is None else 1 / out_scale),
    )
    return out


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    vision = model.vision
    if vision is None:
        return None
    return _misfit(model.capability, model.dtype, vision.num_patches, vision.dim // vision.num_heads)


def compilations(model: ModelShape) -> list[Callable[[], None]]:
    """Returns functions that compile what `crop_attention` needs for a model that it supports."""
    vision = model.vision
    if vision is None:
        return []
    sizes = vision.num_patches, vision.num_heads, vision.dim // vision.num_heads
    sources = [_source(_ELEMENTS[model.dtype], *sizes, is_float8) for is_float8 in {False, vision.has_fixed_scales}]
    return [partial(compile_together, [source], _ARCHITECTURE) for source in sources]


def _misfit(capability: tuple[int, int] | None, dtype: torch.dtype, num_patches: int, head_dim: int) -> str | None:
    """Returns why the kernel does not support a device, a type or sizes; None if it does."""
    if capability != _HOPPER:
        return "it is written for compute capability 9.0"
    if dtype not in _ELEMENTS:
        return f"it takes bfloat16 and float16, not {dtype}"
    if head_dim % 8 or not 16 <= head_dim <= _WIDEST_HEAD:
        return f"it takes heads of 16 to {_WIDEST_HEAD} dimensions, a multiple of 8, not of {head_dim}"
    if num_patches <= _TILE:
        return f"it takes crops of more than {_TILE} patches, not of {num_patches}"
    if _operand_bytes(num_patches, head_dim) > HOPPER_SHARED_BYTES:
        return f"keys and values of {num_patches} patches and {head_dim} dimensions do not fit into shared memory"
    return None


@functools.cache
def _program(
    device: torch.device, dtype: torch.dtype, num_patches: int, num_heads: int, head_dim: int, is_float8: bool
) -> Program | None:
    # One program for each device: a program is loaded onto the current device.
    if _misfit(DeviceLimits.of(device).capability, dtype, num_patches, head_dim) is not None:
        return None
    try:
        with torch.cuda.device(device):
            source = _source(_ELEMENTS[dtype], num_patches, num_heads, head_dim, is_float8)
            return Program(source, "crop_attention", architecture=_ARCHITECTURE, shared_bytes=HOPPER_SHARED_BYTES)
    except (OSError, RuntimeError) as error:
        _log.warning("attention within crops uses cuDNN: %s", error)
        return None


def _source(element: str, num_patches: int, num_heads: int, head_dim: int, is_float8: bool) -> str:
    """Returns CUDA source for crops of these sizes; `element` is bf16 or f16."""
    definitions = {
        "DIM": head_dim,
        "HEADS": num_heads,
        "PATCHES": num_patches,
        "TILE": _TILE,
        "WARPGROUPS": _WARPGROUPS,
        "PIECE_BYTES": _piece_bytes(num_patches),
        "SHARED_BYTES": HOPPER_SHARED_BYTES,
        "ELEMENT": f'"{element}"',
        "IS_FLOAT8": int(is_float8),
    }
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in definitions.items()),
            *(
                product_source("multiply_keys", columns, element, transposed=False, accumulates=False)
                for columns in {_TILE, _tail(num_patches)}
            ),
            product_source("multiply_values", head_dim, element, transposed=True, accumulates=True),
            Path(__file__).with_suffix(".cu").read_text(),
        ]
    )


def _tail(num_patches: int) -> int:
    # Keys of the last tile, in multiples of sixteen, as products require.
    return math.ceil(((num_patches - 1) % _TILE + 1) / 16) * 16


def _piece_bytes(num_patches: int) -> int:
    return ((num_patches - 1) // _TILE * _TILE + _tail(num_patches)) * 16 + _PAD_BYTES


def _operand_bytes(num_patches: int, head_dim: int) -> int:
    # Keys and values, and three barriers for each tile.
    return 2 * head_dim // 8 * _piece_bytes(num_patches) + 3 * 8 * math.ceil(num_patches / _TILE)


def product_source(name: str, columns: int, element: str, *, transposed: bool, accumulates: bool) -> str:
    """Returns CUDA source of a warpgroup product (wgmma) of Hopper, whose instruction's name contains its sizes:
    a device function `name(float (&sums)[columns / 2], const uint32 (&or *) left, uint64 right, bool add)`.

    Source: PTX ISA, section "Asynchronous warpgroup level matrix multiply-accumulate".
    The 64 x 16 left operand is in registers. The 16 x `columns` right operand is in shared memory, as its
    descriptor says: by columns or, if `transposed`, by rows. A function that `accumulates` always adds to `sums`.
    Another one has the argument `add`; if that is false, it overwrites `sums`. `element` is bf16 or f16.
    """
    num_sums = columns // 2
    sums = ", ".join(f"%{i}" for i in range(num_sums))
    left = ", ".join(f"%{num_sums + i}" for i in range(4))
    right, add = f"%{num_sums + 4}", f"%{num_sums + 5}"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element}"
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(num_sums))
    inputs = ", ".join(f'"r"(left[{i}])' for i in range(4))
    return f"""
__device__ void {name}(float (&sums)[{num_sums}], const unsigned int* left, unsigned long long right{
        "" if accumulates else ", bool add"
    }) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, {add}, 0; {instruction} "
        "{{{sums}}}, {{{left}}}, {right}, p, 1, 1, {int(transposed)}; }}"
        : {outputs}
        : {inputs}, "l"(right), "r"((int){"true" if accumulates else "add"}));
}}
"""
