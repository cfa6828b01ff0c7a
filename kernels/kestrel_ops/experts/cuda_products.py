"""Multiplies by float8 experts on Hopper; a warpgroup of its own loads the operands."""

from __future__ import annotations

import functools
import logging
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kestrel_ops.compilation.cuda_program import Program, TensorMap, compile_together, tensor_map
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.triton_products import Inner
from kestrel_ops.experts.triton_routing import Routing

_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_BLOCK = 128  # columns of an iteration, and with few tokens those that share a scale
_MULTIPLIERS = 2 * 128  # threads
_STEP = 16  # tokens; each number of tokens for which there is a product takes time to compile

_log = logging.getLogger(__name__)


def fits(up: Tensor, config: WarpgroupConfig) -> bool:
    """Returns True if the sizes of experts are multiples of the blocks of the programs."""
    dim, inner, tiles = up.shape[2], up.shape[1] // 2, config.tiles
    return dim % (128 * tiles) == 0 and inner % (64 * tiles) == 0 and inner % _BLOCK == 0


def expand(
    routing: Routing,  # with rows in float8 and items of the launch configuration's `block_tokens`
    weight: Tensor,  # [E, 2 * inner, dim] float8, contiguous
    weight_scale: Tensor,  # [E, 2 * inner] float32
    config: WarpgroupConfig,
    dtype: torch.dtype,  # bfloat16 or float16; also of the result, unless `config` is for few tokens
    *,
    is_dependent: bool,
) -> Inner:
    """Computes gelu(first half) * (second half + 1) of the product with the first weight, for each pair."""
    width, num_pairs, device = weight.shape[1] // 2, len(routing.pairs), weight.device
    assert routing.row_scales is not None
    if config.is_few:
        rows = torch.empty(num_pairs, width, dtype=weight.dtype, device=device)
        scales = torch.empty(num_pairs, width // _BLOCK, dtype=torch.float32, device=device)
        inner = Inner(rows, scales, _BLOCK)
    else:
        inner = Inner(torch.empty(num_pairs, width, dtype=dtype, device=device), None, width)
    _launch(
        *(routing, routing.rows, routing.row_scales, weight, weight_scale, inner.rows, inner.scales, config, dtype),
        is_gated=True,
        is_dependent=is_dependent,
    )
    return inner


def contract(
    routing: Routing,
    inner: Inner,  # in float8: with few tokens as `expand` returns it, else with one scale for each row
    weight: Tensor,  # [E, dim, inner] float8, contiguous
    weight_scale: Tensor,  # [E, dim] float32
    config: WarpgroupConfig,
    dtype: torch.dtype,  # of the result: bfloat16 or float16
    *,
    is_dependent: bool,
) -> Tensor:  # [T * choices, dim]: rows by pair
    """Returns the product with the second weight, for each pair."""
    rows = torch.empty(len(routing.pairs), weight.shape[1], dtype=dtype, device=weight.device)
    assert inner.scales is not None
    assert inner.scale_columns == (_BLOCK if config.is_few else weight.shape[2])
    _launch(
        *(routing, inner.rows, inner.scales, weight, weight_scale, rows, None, config, dtype),
        is_gated=False,
        is_dependent=is_dependent,
    )
    return rows


def _launch(
    routing: Routing,
    rows: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    out_scales: Tensor | None,
    config: WarpgroupConfig,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    is_dependent: bool,
) -> None:
    if weight.device.type == "meta":  # Triton's kernels are being compiled
        return
    columns, width, choices = weight.shape[2], out.shape[1], routing.weights.shape[1]
    program = _program(weight.device, columns, width, choices, config, dtype, is_gated, is_dependent)
    num_items = routing.items.shape[1]
    multiprocessors = torch.cuda.get_device_properties(weight.device).multi_processor_count
    num_tiles = num_items * (width // (64 * config.tiles * (1 if is_gated else 2)))
    num_programs = min(num_tiles, config.programs * multiprocessors)
    program.launch(
        *(num_programs, _MULTIPLIERS + _loaders(config)),
        _weight_map(weight.data_ptr(), tuple(weight.shape), config.tiles, is_gated),
        *(c_void_p(tensor.data_ptr()) for tensor in (rows, row_scales, weight_scale)),
        *(c_void_p(tensor.data_ptr()) for tensor in (routing.pairs, routing.items, out)),
        c_void_p(None if out_scales is None else out_scales.data_ptr()),
        c_int(num_items),
        is_dependent=is_dependent,
    )


@functools.lru_cache(maxsize=1024)
def _weight_map(address: int, shape: tuple[int, int, int], tiles: int, is_gated: bool) -> TensorMap:
    num_experts, rows, columns = shape
    if not is_gated:
        return tensor_map(
            address, (columns, rows, num_experts), (columns, rows * columns), (_BLOCK, 128 * tiles, 1)
        )
    # Eight rows of the activated half, the same of the gate half, then the next eight.
    return tensor_map(
        address,
        (columns, 8, 2, rows // 16, num_experts),
        (columns, rows // 2 * columns, 8 * columns, rows * columns),
        (_BLOCK, 8, 2, 8 * tiles, 1),
    )


@functools.cache
def _program(
    device: torch.device,
    columns: int,
    width: int,
    choices: int,
    config: WarpgroupConfig,
    dtype: torch.dtype,
    is_gated: bool,
    is_dependent: bool,
) -> Program:
    # One program for each device: a program is loaded onto the current device.
    sizes = columns, width, choices
    source = source_of(*sizes, config, _ELEMENTS[dtype], is_gated=is_gated, is_dependent=is_dependent)
    with torch.cuda.device(device):
        shared_bytes = _shared_bytes(columns, config, is_gated=is_gated)
        return Program(source, "expert_product", architecture="sm_90a", shared_bytes=shared_bytes)


def _shared_bytes(columns: int, config: WarpgroupConfig, *, is_gated: bool) -> int:
    tokens, stages = config.block_tokens, config.num_stages
    if not config.is_few:
        results = 2 * _pass_bytes(config)
    elif is_gated:
        results = tokens * 64 * config.tiles
    else:
        results = columns // _BLOCK * tokens * 4
    barriers_and_tokens = 2 * stages * 8 + 2 * tokens * 4
    return stages * (128 * config.tiles + tokens) * _BLOCK + results + barriers_and_tokens


def _loaders(config: WarpgroupConfig) -> int:
    # Threads: of a whole warpgroup registers can be given to those that multiply; two programs have fewer of them.
    if config.programs == 1:
        return 128
    return 32 if config.is_few else 64


def _pass_bytes(config: WarpgroupConfig) -> int:
    # Two programs leave less for each.
    return 16_384 if config.programs == 1 else 4096


def source_of(
    columns: int,
    width: int,
    choices: int,
    config: WarpgroupConfig,
    element: str,
    *,
    is_gated: bool,
    is_dependent: bool,
) -> str:
    """Returns CUDA source for a weight of so many columns and a result of such a width; `element` is bf16 or
    f16."""
    tokens = config.block_tokens
    definitions = {
        "COLUMNS": columns,
        "WIDTH": width,
        "CHOICES": choices,
        "TILES": config.tiles,
        "TOKENS": tokens,
        "STEP": _STEP,
        "STAGES": config.num_stages,
        "PROGRAMS": config.programs,
        "LOADERS": _loaders(config),
        "PASS_BYTES": _pass_bytes(config),
        "SHARED_BYTES": _shared_bytes(columns, config, is_gated=is_gated),
        "IS_GATED": int(is_gated),
        "IS_FEW": int(config.is_few),
        "IS_DEPENDENT": int(is_dependent),
        "ELEMENT": f'"{element}"',
    }
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in definitions.items()),
            "typedef unsigned int uint32;",
            "typedef unsigned long long uint64;",
            "template <int N> struct Product;",
            *(_product_source(count, tokens // 2) for count in range(_STEP, tokens + 1, _STEP)),
            Path(__file__).with_suffix(".cu").read_text(),
        ]
    )


def _product_source(count: int, num_sums: int) -> str:
    """Returns CUDA source of a warpgroup product (wgmma) of Hopper in float8 for so many tokens; without `adds` its
    `add` replaces the sums.

    Source: PTX ISA, section "Asynchronous warpgroup level matrix multiply-accumulate".
    """
    used = count // 2
    sums = ", ".join(f"%{i}" for i in range(used))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{count}k32.f32.e4m3.e4m3"
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(used))
    return f"""
template <>
struct Product<{count}> {{
    static __device__ __forceinline__ void add(float (&sums)[{num_sums}], uint64 left, uint64 right, int adds) {{
        asm volatile(
            "{{ .reg .pred p; setp.ne.b32 p, %{used + 2}, 0; {instruction} "
            "{{{sums}}}, %{used}, %{used + 1}, p, 1, 1; }}"
            : {outputs}
            : "l"(left), "l"(right), "r"(adds));
    }}
}};
"""


def can_run(
    up: Tensor,
    choices: int,
    config: WarpgroupConfig,
    dtype: torch.dtype,
    other_sources: tuple[str, ...] = (),
    *,
    is_dependent: bool,
) -> bool:
    """Returns True if both products exist for these experts on their device.

    The first call compiles the programs of all launch configurations together with `other_sources`. The log says
    why one does not compile.
    """
    if dtype not in _ELEMENTS or not DeviceLimits.of(up.device).is_hopper or not fits(up, config):
        return False
    if up.device.type == "meta":
        return True
    configs = tuple(each for each in CONFIGS if fits(up, each)) + (() if config in CONFIGS else (config,))
    sizes = up.shape[2], up.shape[1] // 2, choices
    return _prepare(up.device, *sizes, configs, dtype, other_sources, is_dependent)


@functools.cache
def _prepare(
    device: torch.device,
    dim: int,
    inner: int,
    choices: int,
    configs: tuple[WarpgroupConfig, ...],
    dtype: torch.dtype,
    other_sources: tuple[str, ...],
    is_dependent: bool,
) -> bool:
    sides = ((dim, inner, True), (inner, dim, False))
    products = [(config, columns, width, is_gated) for config in configs for columns, width, is_gated in sides]
    element = _ELEMENTS[dtype]
    own = [
        source_of(columns, width, choices, config, element, is_gated=is_gated, is_dependent=is_dependent)
        for config, columns, width, is_gated in products
    ]
    try:
        compile_together([*own, *other_sources], "sm_90a")
        # Not later, when a graph may be captured.
        for config, columns, width, is_gated in products:
            _program(device, columns, width, choices, config, dtype, is_gated, is_dependent)
    except (OSError, RuntimeError) as error:
        _log.warning("experts use Triton: %s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class WarpgroupConfig:
    """Divides both products of a mixture of experts into programs."""

    block_tokens: int
    """The most tokens of an item, a multiple of 16."""
    tiles: int
    """Blocks of 64 rows of the weight for each of two warpgroups; times `block_tokens` at most 256."""
    num_stages: int
    """Iterations whose loads run concurrently."""
    is_few: bool
    """True if the first product quantises its results, and programs leave room for others."""
    programs: int
    """Programs of each multiprocessor, which take tiles in turns: two for few tokens, else one."""


_FEWEST = 6
"""Tokens of an expert, up to which Triton's programs are faster: they leave attention more room."""

CONFIGS = (
    WarpgroupConfig(16, tiles=2, num_stages=3, is_few=True, programs=2),
    WarpgroupConfig(32, tiles=2, num_stages=3, is_few=True, programs=2),
    WarpgroupConfig(64, tiles=1, num_stages=4, is_few=False, programs=2),
    WarpgroupConfig(128, tiles=2, num_stages=4, is_few=False, programs=1),
)
"""The fastest on one H200 (`bench.experts`), by the tokens of an item."""


def config_for(per_expert: float) -> WarpgroupConfig | None:
    """Returns the launch configuration for so many tokens of an expert; None where Triton's kernels are faster."""
    if per_expert <= _FEWEST:
        return None
    # Experts have more tokens than the mean.
    return next((config for config in CONFIGS if per_expert <= 0.75 * config.block_tokens), CONFIGS[-1])
