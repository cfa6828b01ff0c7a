"""Computes routing of float8 experts on Hopper: a warp for each token, and lists from counts of bits."""

from __future__ import annotations

import functools
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from kestrel_ops.compilation.cuda_program import Program
from kestrel_ops.experts.triton_routing import Routing, most_items
from kestrel_ops.shapes import FLOAT8

MOST_AT_ONCE = 64
"""Tokens up to which one kernel does everything."""
_MOST_EXPERTS = 64
_MOST_CHOICES = 32
_COLUMNS = 256  # whose multiples a warp reads
_WARPS = 32
_TOKENS_AT_ONCE = 16  # of a program, where there are two kernels
_LIST_THREADS = 256
_LANES = 32
_LOGITS = {torch.float32: "float", torch.bfloat16: "unsigned short", torch.float16: "unsigned short"}
_POSITIONS = {torch.int32: "int", torch.int64: "long long", None: "int"}


def can_route(hidden: Tensor, logits: Tensor, choices: int) -> bool:
    """Returns True if the kernels support these sizes and types."""
    is_short = hidden.dtype in (torch.bfloat16, torch.float16)
    return (
        is_short
        and logits.dtype in (torch.float32, hidden.dtype)
        and logits.shape[1] <= _MOST_EXPERTS
        and choices <= _MOST_CHOICES
        and hidden.shape[1] % _COLUMNS == 0
    )


def route(
    hidden: Tensor,  # [T, dim] bfloat16 or float16, contiguous
    logits: Tensor,  # [T, E], contiguous
    choices: int,
    block_tokens: int,  # the most pairs of an item
    positions: Tensor | None = None,  # [T]: tokens at negative ones are padding
    *,
    is_dependent: bool,
) -> Routing:
    """Chooses experts and lists tokens, as `triton_routing.route` does, with tokens in float8."""
    (num_tokens, dim), num_experts, device = hidden.shape, logits.shape[1], hidden.device
    num_items = most_items(num_tokens, num_experts, choices, block_tokens)
    routing = Routing(
        pairs=torch.empty(num_tokens * choices, dtype=torch.int32, device=device),
        items=torch.empty(3, num_items, dtype=torch.int32, device=device),
        weights=torch.empty(num_tokens, choices, dtype=torch.float32, device=device),
        rows=torch.empty(num_tokens, dim, dtype=FLOAT8, device=device),
        row_scales=torch.empty(num_tokens, dtype=torch.float32, device=device),
    )
    if device.type == "meta":  # Triton's kernels are being compiled
        return routing
    source = routing_source(hidden, logits, choices, positions, is_dependent=is_dependent)

    programs = _programs(device, source)

    def launch(kernel: str, num_programs: int, num_threads: int, *arguments: Tensor | int | None) -> None:
        programs[kernel].launch(
            *(num_programs, num_threads),
            *(
                c_int(each) if isinstance(each, int) else c_void_p(None if each is None else each.data_ptr())
                for each in arguments
            ),
            is_dependent=is_dependent,
        )

    outputs = routing.weights, routing.rows, routing.row_scales
    if num_tokens <= MOST_AT_ONCE:
        launch(
            *("route_few", 1 + -(-num_tokens // _WARPS), _WARPS * _LANES),
            *(
                logits,
                hidden,
                positions,
                routing.pairs,
                routing.items,
                *outputs,
                num_tokens,
                num_items,
                block_tokens,
            ),
        )
        return routing
    num_programs = -(-num_tokens // _TOKENS_AT_ONCE)
    num_words = -(-num_programs // 2)  # of 32 tokens
    chosen = torch.empty(num_tokens, choices, dtype=torch.uint8, device=device)
    masks = torch.empty(num_experts, num_words, dtype=torch.int32, device=device)
    launch(
        *("choose_experts", num_programs, _TOKENS_AT_ONCE * _LANES),
        *(logits, hidden, positions, chosen, masks, *outputs, num_tokens, num_words),
    )
    launch(
        *("list_pairs", num_experts, _LIST_THREADS),
        *(chosen, masks, routing.pairs, routing.items, num_words, num_items, block_tokens),
    )
    return routing


@functools.cache
def _programs(device: torch.device, source: str) -> dict[str, Program]:
    # A program is loaded onto the current device: all at once, and not later, when a graph may be captured.
    with torch.cuda.device(device):
        return {
            kernel: Program(source, kernel, architecture="sm_90a", shared_bytes=0)
            for kernel in ("route_few", "choose_experts", "list_pairs")
        }


def routing_source(
    hidden: Tensor, logits: Tensor, choices: int, positions: Tensor | None, *, is_dependent: bool
) -> str:
    """Returns CUDA source for such tokens."""
    position_dtype = None if positions is None else positions.dtype
    sizes = logits.shape[1], choices, hidden.shape[1]
    return _source_of(*sizes, hidden.dtype, logits.dtype, position_dtype, is_dependent)


@functools.cache
def _source_of(
    num_experts: int,
    choices: int,
    dim: int,
    dtype: torch.dtype,
    logit_dtype: torch.dtype,
    position_dtype: torch.dtype | None,
    is_dependent: bool,
) -> str:
    definitions = {
        "EXPERTS": num_experts,
        "CHOICES": choices,
        "COLUMNS": dim,
        "IS_DEPENDENT": int(is_dependent),
        "IS_BF16": int(dtype == torch.bfloat16),
        "LOGIT": _LOGITS[logit_dtype],
        "POSITION": _POSITIONS[position_dtype],
    }
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in definitions.items()),
            Path(__file__).with_suffix(".cu").read_text(),
        ]
    )
