"""Calls of the operations with tensors of any values, for those who look at what they do and not at results.

Each takes sizes and types as JSON can say them, and at the end the implementation, Triton's if none is named.
"""

from typing import Any

import torch
from torch import Tensor

from kestrel_ops import BlockLowRank, LowRank
from kestrel_ops.dispatch import function_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_DTYPES |= {"int4": torch.uint8}  # of two weights


def _operation(implementation: str, name: str) -> Any:
    return function_of(implementation, name)


def _empty(*shape: int, dtype: str = "fp32") -> Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype])


def add_layer_norm(count: int, width: int, delta: str, out: str, of: str = "triton") -> None:
    """`count` float32 rows with a delta of another type."""
    operation = _operation(of, "add_layer_norm")
    operation(_empty(count, width), _empty(count, width, dtype=delta), 1e-5, _DTYPES[out])


def rotary_write_kv(
    heads: int, groups: int, head_dim: int, dtype: str, pages: str, has_factors: bool, of: str = "triton"
) -> None:
    """Three tokens whose heads are rotated in half of their dimensions."""
    storage = _empty(2, groups, 16, head_dim, dtype=pages)
    angles, scale = _empty(64, head_dim // 4), _empty(1) if pages == "fp8" else None
    factors = (_empty(3, heads, dtype=dtype), _empty(3, groups, dtype=dtype)) if has_factors else (None, None)
    qkv = _empty(3, (heads + 2 * groups) * head_dim, dtype=dtype)
    numbers = torch.zeros(3, dtype=torch.int64)
    _operation(of, "rotary_write_kv")(
        qkv, numbers, angles, angles, storage, storage.clone(), numbers, scale, scale, *factors
    )


def decode_contract(batch: int, width: int, num_rows: int, weight: str, of: str = "triton") -> None:
    """`batch` tokens, whose activations are float16 where the weight is float8."""
    scale = _empty(num_rows) if weight == "fp8" else None
    activations = _empty(batch, width, dtype="fp16" if weight == "fp8" else weight)
    _operation(of, "decode_contract")(
        activations, _empty(num_rows, width, dtype=weight), scale, _empty(num_rows), _empty(batch, num_rows)
    )


def decode_expand(
    batch: int, width: int, num_plain: int, num_activated: int, weight: str, num_parts: int, of: str = "triton"
) -> None:
    """`batch` tokens, with so many parts pending."""
    num_rows, out = num_plain + num_activated, "fp16" if weight == "fp8" else weight
    _operation(of, "decode_expand")(
        _empty(batch, width),
        _empty(num_rows, width, dtype=weight),
        _empty(num_rows) if weight == "fp8" else None,
        _empty(num_rows),
        _empty(num_rows),
        1e-5,
        num_plain,
        _empty(batch, num_plain, dtype=out),
        _empty(batch, num_activated, dtype=out),
        _empty(num_parts, batch, width) if num_parts else None,
    )


def prefill_attention(
    heads: int, groups: int, head_dim: int, dtype: str, pages: str, max_chunk: int, of: str = "triton"
) -> None:
    """One chunk of packed rows."""
    rows = _empty(max_chunk, (heads + 2 * groups) * head_dim, dtype=dtype).unflatten(1, (-1, head_dim))
    storage = _empty(2, groups, 16, head_dim, dtype=pages)
    numbers, scale = torch.zeros(2, dtype=torch.int32), _empty(1) if pages == "fp8" else None
    _operation(of, "prefill_attention")(
        *rows.split((heads, groups, groups), dim=1),
        storage,
        storage.clone(),
        numbers[None],
        numbers,
        numbers[:1],
        torch.zeros(max_chunk, dtype=torch.int32),
        max_chunk,
        scale,
        scale,
    )


def rotary_decode_attention(
    heads: int, groups: int, head_dim: int, dtype: str, pages: str, batch: int, num_parts: int, of: str = "triton"
) -> None:
    """One token for each of `batch` sequences."""
    storage = _empty(2, groups, 16, head_dim, dtype=pages)
    angles, scale = _empty(64, head_dim // 4), _empty(1) if pages == "fp8" else None
    numbers = torch.zeros(batch, dtype=torch.int32)
    _operation(of, "rotary_decode_attention")(
        _empty(batch, (heads + 2 * groups) * head_dim, dtype=dtype),
        numbers,
        angles,
        angles,
        storage,
        storage.clone(),
        numbers[:, None],
        _empty(batch, heads * head_dim, dtype=dtype),
        scale,
        scale,
        None,
        None,
        _empty(batch, heads, num_parts, head_dim + 2),
        torch.zeros(batch, heads, dtype=torch.int32),
    )


def concat_gelu(count: int, plain: int, inner: int, dtype: str, out: str, of: str = "triton") -> None:
    """`count` rows of two parts, of which the first may be of no width."""
    left = _empty(count, plain, dtype=dtype) if plain else None
    _operation(of, "concat_gelu")(left, _empty(count, inner, dtype=dtype), _DTYPES[out])


def resample(height: int, width: int, length: int, dim: int, of: str = "triton") -> None:
    """An RGB image, along one axis; then the same of pixels of four bytes, of which one window is wanted."""
    taps = torch.zeros(5, length, dtype=torch.int32)
    _operation(of, "resample")(torch.zeros(height, width, 3, dtype=torch.uint8), taps, dim)
    windows = torch.zeros(1, 2, dtype=torch.int32)
    _operation(of, "resample")(torch.zeros(height, width, 4, dtype=torch.uint8), taps, dim, windows, 7)


def hash_words(count: int, num_words: int, of: str = "triton") -> None:
    """Rows of words, by four functions."""
    multipliers = torch.zeros(4, num_words, dtype=torch.int64)
    _operation(of, "hash_words")(torch.zeros(count, num_words, dtype=torch.int32), multipliers)


def philox_uniform(count: int, of: str = "triton") -> None:
    """Seeds and counters of some rows."""
    rows = torch.zeros(count, dtype=torch.int64)
    _operation(of, "philox_uniform")(rows, rows)


def pick_allowed(count: int, num_choices: int, of: str = "triton") -> None:
    """Logits, and two rules."""
    forbidden, rules = torch.zeros(2, num_choices, dtype=torch.bool), torch.zeros(count, 6, dtype=torch.int64)
    _operation(of, "pick_allowed")(_empty(count, num_choices, dtype="bf16"), forbidden, rules[:, 2])


def advance_rows(count: int, of: str = "triton") -> None:
    """Samples of text, and samples with values of a step whose numbers are looked at."""
    integers, values = torch.zeros(9, 6, dtype=torch.int64), torch.zeros(9, 2)
    successors, rows = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    operands = integers, values, successors, rows, rows
    _operation(of, "advance_rows")(*operands)
    _operation(of, "advance_rows")(
        *operands, rows, torch.zeros(count, 2), torch.zeros(count, 1), torch.zeros(count, dtype=torch.bool)
    )


def scaled_linear(count: int, width: int, num_rows: int, weight: str, of: str = "triton") -> None:
    """Rows of float8 with a scale each, or of the weight's type."""
    scales = (_empty(count, 1), _empty(num_rows)) if weight == "fp8" else (None, None)
    x, matrix = _empty(count, width, dtype=weight), _empty(num_rows, width, dtype=weight)
    _operation(of, "scaled_linear")(x, scales[0], matrix, scales[1], _empty(num_rows), torch.bfloat16)


def few_rows(count: int, width: int, num_rows: int) -> None:
    """A product in float8 with a scale for each row."""
    from kestrel_ops.linear.triton_few_rows import multiply_few

    operands = _empty(count, width, dtype="fp8"), _empty(count, 1), _empty(num_rows, width, dtype="fp8")
    multiply_few(*operands, _empty(num_rows), _empty(num_rows, dtype="bf16"), torch.bfloat16)


def scaled_linear_gelu(count: int, width: int, num_rows: int, of: str = "triton") -> None:
    """Float8 rows and a float8 weight, one scale each."""
    operands = _empty(count, width, dtype="fp8"), _empty(1), _empty(num_rows, width, dtype="fp8"), _empty(1)
    _operation(of, "scaled_linear_gelu")(*operands, _empty(num_rows, dtype="bf16"), _empty(1))


def scaled_linear_add(count: int, width: int, num_rows: int, of: str = "triton") -> None:
    """Float8 rows and a float8 weight, one scale each, added to a stream in bfloat16."""
    operands = _empty(count, width, dtype="fp8"), _empty(1), _empty(num_rows, width, dtype="fp8"), _empty(1)
    bias, hidden = _empty(num_rows, dtype="bf16"), _empty(count, num_rows, dtype="bf16")
    _operation(of, "scaled_linear_add")(*operands, bias, hidden)


def crop_attention(num_crops: int, num_patches: int, num_heads: int, head_dim: int, of: str = "triton") -> None:
    """Packed queries, keys and values in bfloat16."""
    packed = _empty(num_crops * num_patches, 3 * num_heads * head_dim, dtype="bf16")
    _operation(of, "crop_attention")(packed, num_patches, num_heads)


def mixture_of_experts(
    count: int, dim: int, inner: int, num_experts: int, weight: str = "bf16", of: str = "triton"
) -> None:
    """Tokens in bfloat16, two experts for each token."""
    up, down = (num_experts, 2 * inner, dim), (num_experts, dim, inner)
    scales: tuple[Tensor, ...] = (_empty(*up[:2]), _empty(*down[:2])) if weight == "fp8" else ()
    if weight == "int4":
        up, down = ((each, -(-width // 128), num_rows, 64) for each, num_rows, width in (up, down))
        scales = _empty(*up[:3], 2, dtype="bf16"), _empty(*down[:3], 2, dtype="bf16")
    hidden, logits = _empty(count, dim, dtype="bf16"), _empty(count, num_experts, dtype="bf16")
    stacks = _empty(*up, dtype=weight), _empty(*down, dtype=weight)
    _operation(of, "mixture_of_experts")(hidden, logits, *stacks, 2, *scales)


def layer_norm_linear(count: int, dim: int, num_rows: int, of: str = "triton") -> None:
    """Rows in float32 and a layer in bfloat16."""
    layer = _empty(num_rows, dim, dtype="bf16"), _empty(num_rows, dtype="bf16")
    norm = _empty(dim, dtype="bf16"), _empty(dim, dtype="bf16")
    _operation(of, "layer_norm_linear")(_empty(count, dim), *norm, 1e-5, *layer)


def tau_scales(count: int, heads: int, width: int, of: str = "triton") -> None:
    """Packed rows in bfloat16."""
    weights = _empty(heads, width, dtype="bf16"), _empty(heads, width, dtype="bf16"), _empty(heads, dtype="bf16")
    packed, positions = _empty(count, width, dtype="bf16"), torch.zeros(count, dtype=torch.int64)
    _operation(of, "tau_scales")(packed, positions, *weights)


def _low_rank(num_slots: int, rank: int, dim: int, out: int, kind: int = 0) -> LowRank:
    return LowRank(_empty(num_slots, rank, dim, dtype="bf16"), _empty(num_slots, rank, out, dtype="bf16"), kind)


def _block_low_rank(
    count: int, dim: int, qkv: int, inner: int, num_slots: int, rank: int, of: str, *, is_decode: bool
) -> BlockLowRank:
    """The adapters of a block in bfloat16, and rows that use none."""
    up, down = (_low_rank(num_slots, rank, dim, qkv),), (_low_rank(num_slots, rank, dim, dim, 1),)
    if inner:
        up, down = (
            (*up, _low_rank(num_slots, rank, dim, inner, 2)),
            (*down, _low_rank(num_slots, rank, inner, dim, 3)),
        )
    slots, ranks = torch.zeros(count, dtype=torch.int64), torch.full((4, num_slots), rank, dtype=torch.int32)
    rows = _operation(of, "rows_by_slot")(slots, ranks, rank, is_decode=is_decode, dtype=torch.bfloat16)
    norm, flags = (
        (_empty(dim, dtype="bf16"), _empty(dim, dtype="bf16")),
        torch.zeros(num_slots + 1, dtype=torch.bool),
    )
    return BlockLowRank(up, down, *norm, flags, _empty(count, dim, dtype="bf16"), rows)


def add_low_rank(count: int, dim: int, out: int, num_slots: int, rank: int, of: str = "triton") -> None:
    """Rows in bfloat16."""
    rows, sums = _empty(count, dim, dtype="bf16"), _empty(count, out, dtype="bf16")
    slots = torch.zeros(count, dtype=torch.int64)
    _operation(of, "add_low_rank")(sums, rows, _low_rank(num_slots, rank, dim, out), slots)


def rows_by_slot(count: int, num_slots: int, rank: int, is_decode: bool, of: str = "triton") -> None:
    """Rows without adapters."""
    slots, ranks = torch.zeros(count, dtype=torch.int64), torch.full((4, num_slots), rank, dtype=torch.int32)
    _operation(of, "rows_by_slot")(slots, ranks, rank, is_decode=is_decode, dtype=torch.bfloat16)


def add_up_terms(count: int, dim: int, qkv: int, inner: int, num_slots: int, rank: int, of: str = "triton") -> None:
    """Rows in bfloat16."""
    low_rank = _block_low_rank(count, dim, qkv, inner, num_slots, rank, of, is_decode=False)
    _operation(of, "add_up_terms")(_empty(count, qkv + inner, dtype="bf16"), low_rank)


def add_down_terms(
    count: int, dim: int, inner: int, num_slots: int, rank: int, operand: str = "bf16", of: str = "triton"
) -> None:
    """Activations of a type, with scales where that is float8, added to rows in bfloat16."""
    activations = _empty(count, dim + inner, dtype=operand)
    scale = _empty(count, 1) if operand == "fp8" else None
    low_rank = _block_low_rank(count, dim, dim, inner, num_slots, rank, of, is_decode=False)
    _operation(of, "add_down_terms")(_empty(count, dim, dtype="bf16"), activations, scale, low_rank)


def step_with_adapters(
    count: int, dim: int, qkv: int, inner: int, num_slots: int, rank: int, weight: str, of: str = "triton"
) -> None:
    """Both products of a decode step."""
    out = "fp16" if weight == "fp8" else weight
    low_rank = _block_low_rank(count, dim, qkv, inner, num_slots, rank, of, is_decode=True)
    up, down, scale = _empty(qkv + inner, dim, dtype=weight), _empty(dim, dim + inner, dtype=weight), None
    hidden, activations = _empty(count, dim), _empty(count, dim + inner, dtype=out)
    if weight == "fp8":
        scale = _empty(max(qkv + inner, dim))
    _operation(of, "decode_expand")(
        *(hidden, up, scale, _empty(qkv + inner), _empty(qkv + inner), 1e-5, qkv),
        *(_empty(count, qkv, dtype=out), activations[:, dim:], None, low_rank),
    )
    _operation(of, "decode_contract")(activations, down, scale, _empty(dim), hidden, True, low_rank)


def invariant_linear(count: int, width: int, num_out: int, dtype: str, of: str = "library") -> None:
    """`count` rows by a matrix, with a bias."""
    rows, weight = _empty(count, width, dtype=dtype), _empty(num_out, width, dtype=dtype)
    _operation(of, "invariant_linear")(rows, weight, _empty(num_out, dtype=dtype))


def invariant_experts(count: int, dim: int, inner: int, num_experts: int, weight: str, of: str = "triton") -> None:
    """Tokens in bfloat16, two experts for each token."""
    up, down = _empty(num_experts, 2 * inner, dim, dtype=weight), _empty(num_experts, dim, inner, dtype=weight)
    scales = (_empty(num_experts, 2 * inner), _empty(num_experts, dim)) if weight == "fp8" else ()
    hidden, logits = _empty(count, dim, dtype="bf16"), _empty(count, num_experts, dtype="bf16")
    _operation(of, "invariant_experts")(hidden, logits, up, down, 2, *scales)


def invariant_attention(
    heads: int, groups: int, head_dim: int, dtype: str, pages: str, max_chunk: int, of: str = "triton"
) -> None:
    """One chunk of packed rows, whose keys and values are in pages."""
    rows = _empty(max_chunk, (heads + 2 * groups) * head_dim, dtype=dtype).unflatten(1, (-1, head_dim))
    storage = _empty(64, groups, 16, head_dim, dtype=pages)
    scale = _empty(1) if pages == "fp8" else None
    _operation(of, "invariant_attention")(
        rows[:, :heads],
        storage,
        storage.clone(),
        torch.zeros(1, 64, dtype=torch.int32),
        torch.tensor([0, max_chunk], dtype=torch.int32),
        torch.tensor([max_chunk], dtype=torch.int32),
        torch.arange(1, max_chunk + 1, dtype=torch.int32),
        max_chunk,
        scale,
        scale,
    )
