"""The products of float8 experts on Hopper, whose operands are loaded by a warpgroup of their own."""

from __future__ import annotations

import functools
import logging
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from kestrel_ops.compilation.cuda_program import Program, TensorMap, compile_together, tensor_map
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.cuda_plans import PLANS, WarpgroupPlan
from kestrel_ops.experts.triton_products import Inner
from kestrel_ops.experts.triton_routing import Routing

_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_BLOCK = 128  # columns of an iteration, and with few tokens those that share a scale
_MULTIPLIERS = 2 * 128  # threads
_STEP = 16  # tokens; each number of tokens for which there is a product takes time to compile

_log = logging.getLogger(__name__)


def fits(up: Tensor, plan: WarpgroupPlan) -> bool:
    """Whether the sizes of experts are multiples of what the programs divide."""
    dim, inner, tiles = up.shape[2], up.shape[1] // 2, plan.tiles
    return dim % (128 * tiles) == 0 and inner % (64 * tiles) == 0 and inner % _BLOCK == 0


def expand(
    routing: Routing,  # with rows in float8 and items of the plan's `block_tokens`
    weight: Tensor,  # [E, 2 * inner, dim] float8, contiguous
    weight_scale: Tensor,  # [E, 2 * inner] float32
    plan: WarpgroupPlan,
    dtype: torch.dtype,  # bfloat16 or float16; of the result, too, unless the plan is for few tokens
    *,
    is_dependent: bool,
) -> Inner:
    """gelu(first half) * (second half + 1) of the product with the first weight, for each pair."""
    width, num_pairs, device = weight.shape[1] // 2, len(routing.pairs), weight.device
    assert routing.row_scales is not None
    if plan.is_few:
        rows = torch.empty(num_pairs, width, dtype=weight.dtype, device=device)
        scales = torch.empty(num_pairs, width // _BLOCK, dtype=torch.float32, device=device)
        inner = Inner(rows, scales, _BLOCK)
    else:
        inner = Inner(torch.empty(num_pairs, width, dtype=dtype, device=device), None, width)
    _launch(
        *(routing, routing.rows, routing.row_scales, weight, weight_scale, inner.rows, inner.scales, plan, dtype),
        is_gated=True,
        is_dependent=is_dependent,
    )
    return inner


def contract(
    routing: Routing,
    inner: Inner,  # in float8: with few tokens as `expand` returns it, else with one scale for each row
    weight: Tensor,  # [E, dim, inner] float8, contiguous
    weight_scale: Tensor,  # [E, dim] float32
    plan: WarpgroupPlan,
    dtype: torch.dtype,  # of the result: bfloat16 or float16
    *,
    is_dependent: bool,
) -> Tensor:  # [T * choices, dim]: rows by pair
    """The product with the second weight, for each pair."""
    rows = torch.empty(len(routing.pairs), weight.shape[1], dtype=dtype, device=weight.device)
    assert inner.scales is not None
    assert inner.scale_columns == (_BLOCK if plan.is_few else weight.shape[2])
    _launch(
        *(routing, inner.rows, inner.scales, weight, weight_scale, rows, None, plan, dtype),
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
    plan: WarpgroupPlan,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    is_dependent: bool,
) -> None:
    if weight.device.type == "meta":  # Triton's kernels are being compiled
        return
    columns, width, choices = weight.shape[2], out.shape[1], routing.weights.shape[1]
    program = _program(weight.device, columns, width, choices, plan, dtype, is_gated, is_dependent)
    num_items = routing.items.shape[1]
    multiprocessors = torch.cuda.get_device_properties(weight.device).multi_processor_count
    num_tiles = num_items * (width // (64 * plan.tiles * (1 if is_gated else 2)))
    num_programs = min(num_tiles, plan.programs * multiprocessors)
    program.launch(
        *(num_programs, _MULTIPLIERS + _loaders(plan)),
        _weight_map(weight.data_ptr(), tuple(weight.shape), plan.tiles, is_gated),
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
    plan: WarpgroupPlan,
    dtype: torch.dtype,
    is_gated: bool,
    is_dependent: bool,
) -> Program:
    # One program for each device: a program is loaded onto the current device.
    sizes = columns, width, choices
    source = source_of(*sizes, plan, _ELEMENTS[dtype], is_gated=is_gated, is_dependent=is_dependent)
    with torch.cuda.device(device):
        shared_bytes = _shared_bytes(columns, plan, is_gated=is_gated)
        return Program(source, "expert_product", architecture="sm_90a", shared_bytes=shared_bytes)


def _shared_bytes(columns: int, plan: WarpgroupPlan, *, is_gated: bool) -> int:
    tokens, stages = plan.block_tokens, plan.num_stages
    if not plan.is_few:
        results = 2 * _pass_bytes(plan)
    elif is_gated:
        results = tokens * 64 * plan.tiles
    else:
        results = columns // _BLOCK * tokens * 4
    barriers_and_tokens = 2 * stages * 8 + 2 * tokens * 4
    return stages * (128 * plan.tiles + tokens) * _BLOCK + results + barriers_and_tokens


def _loaders(plan: WarpgroupPlan) -> int:
    # Threads: of a whole warpgroup registers can be given to those that multiply; two programs have fewer of them.
    if plan.programs == 1:
        return 128
    return 32 if plan.is_few else 64


def _pass_bytes(plan: WarpgroupPlan) -> int:
    # Two programs leave less for each.
    return 16_384 if plan.programs == 1 else 4096


def source_of(
    columns: int,
    width: int,
    choices: int,
    plan: WarpgroupPlan,
    element: str,
    *,
    is_gated: bool,
    is_dependent: bool,
) -> str:
    """CUDA source for a weight of so many columns and a result of such a width; `element` is bf16 or f16."""
    tokens = plan.block_tokens
    definitions = {
        "COLUMNS": columns,
        "WIDTH": width,
        "CHOICES": choices,
        "TILES": plan.tiles,
        "TOKENS": tokens,
        "STEP": _STEP,
        "STAGES": plan.num_stages,
        "PROGRAMS": plan.programs,
        "LOADERS": _loaders(plan),
        "PASS_BYTES": _pass_bytes(plan),
        "SHARED_BYTES": _shared_bytes(columns, plan, is_gated=is_gated),
        "IS_GATED": int(is_gated),
        "IS_FEW": int(plan.is_few),
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
    """CUDA source of a warpgroup product (wgmma) of Hopper in float8 for so many tokens; without `adds` its `add`
    replaces the sums.

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
    plan: WarpgroupPlan,
    dtype: torch.dtype,
    other_sources: tuple[str, ...] = (),
    *,
    is_dependent: bool,
) -> bool:
    """Whether both products exist for these experts on their device.

    At first the programs of all plans are compiled, and `other_sources` with them, at the same time. The log says
    why one does not compile.
    """
    if dtype not in _ELEMENTS or not DeviceLimits.of(up.device).is_hopper or not fits(up, plan):
        return False
    if up.device.type == "meta":
        return True
    plans = tuple(each for each in PLANS if fits(up, each)) + (() if plan in PLANS else (plan,))
    sizes = up.shape[2], up.shape[1] // 2, choices
    return _prepare(up.device, *sizes, plans, dtype, other_sources, is_dependent)


@functools.cache
def _prepare(
    device: torch.device,
    dim: int,
    inner: int,
    choices: int,
    plans: tuple[WarpgroupPlan, ...],
    dtype: torch.dtype,
    other_sources: tuple[str, ...],
    is_dependent: bool,
) -> bool:
    sides = ((dim, inner, True), (inner, dim, False))
    products = [(plan, columns, width, is_gated) for plan in plans for columns, width, is_gated in sides]
    element = _ELEMENTS[dtype]
    own = [
        source_of(columns, width, choices, plan, element, is_gated=is_gated, is_dependent=is_dependent)
        for plan, columns, width, is_gated in products
    ]
    try:
        compile_together([*own, *other_sources], "sm_90a")
        # Not later, when a graph may be captured.
        for plan, columns, width, is_gated in products:
            _program(device, columns, width, choices, plan, dtype, is_gated, is_dependent)
    except (OSError, RuntimeError) as error:
        _log.warning("experts use Triton: %s", error)
        return False
    return True
