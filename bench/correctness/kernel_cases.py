"""Calls of every operation with random operands of odd sizes, to be run by any implementation on any device.

Operands are drawn on the CPU, so that two implementations, devices or checkouts are given the same.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kestrel_ops import reference
from kestrel_ops.lora.reference import BlockLowRank, LowRank, RowsBySlot

FLOAT8 = torch.float8_e4m3fn
# The largest error relative to the largest value, by the narrowest type that is rounded to on the way; of float8 a
# whole step of 32 in 448, which a tie decided otherwise makes.
TOLERANCES = {torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2, FLOAT8: 8e-2, torch.uint8: 0.0}
_EPSILON = 1e-5
_SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call. `run(function, device)` gives all that it returns or writes."""

    operation: str
    name: str
    run: Callable[[Callable[..., Any], torch.device], list[Tensor]]
    tolerance: float
    needs_cuda: bool = False
    """Whether no implementation but the definition runs without a CUDA device."""


def cases(seed: int) -> Iterator[Case]:
    """Some of every operation; another seed draws other sizes and operands."""
    draw = random.Random(seed)
    for make in (
        _add_layer_norm,
        _concat_gelu,
        _rotary_write_kv,
        _prefill_attention,
        _invariant_attention,
        _decode_expand,
        _decode_contract,
        _rotary_decode_attention,
        _crop_attention,
        _scaled_linear,
        _invariant_linear,
        _whole_products,
        _mixture_of_experts,
        _invariant_experts,
        _add_low_rank,
        _add_up_terms,
        _add_down_terms,
        _rows_by_slot,
        _layer_norm_linear,
        _tau_scales,
        _resample,
        _hash_words,
        _philox_uniform,
        _pick_allowed,
        _advance_rows,
    ):
        for _ in range(4):
            yield make(draw)


def _rows(draw: random.Random, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(48))
    values = torch.randn(shape, generator=generator) * size
    return values.clamp(-448, 448).to(dtype) if dtype == FLOAT8 else values.to(dtype)


def _width(draw: random.Random) -> int:
    return draw.choice((1, 17, 40, 48, 72, 77, 104, 152, draw.randint(2, 300), draw.randint(300, 1300)))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")


def _heads(draw: random.Random) -> tuple[int, int, int]:
    """Query heads, key heads and dimensions of a head."""
    groups = draw.choice((1, 1, 2, 3))
    return groups * draw.choice((1, 2, 5)), groups, draw.choice((12, 20, 24, 36, 64))


def _dequantised(rows: Tensor, scale: Tensor | None) -> Tensor:
    return rows if scale is None else rows.float() * scale.to(rows.device)


def _on(device: torch.device, *tensors: Tensor | None) -> list[Any]:
    """Copies on the device, which the call may change."""
    return [None if tensor is None else tensor.to(device, copy=True) for tensor in tensors]


def _add_layer_norm(draw: random.Random) -> Case:
    count, dim = draw.choice((1, 2, 37, 333, 735)), max(_width(draw), 2)
    dtype, out_dtype = draw.choice((torch.float32, torch.bfloat16)), draw.choice((torch.float32, *_SHORT, FLOAT8))
    hidden, delta = _rows(draw, count, dim, dtype=dtype), _rows(draw, count, dim, dtype=torch.bfloat16)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        stream, added = _on(device, hidden, delta)
        out, scale = function(stream, added, _EPSILON, out_dtype)
        return [stream, _dequantised(out, scale)]

    name = f"{count} x {dim} {_short(dtype)} to {_short(out_dtype)}"
    tolerance = max(TOLERANCES[out_dtype], 1e-2 if dtype == torch.bfloat16 else 0.0)
    return Case("add_layer_norm", name, run, tolerance)


def _concat_gelu(draw: random.Random) -> Case:
    count, plain, inner = draw.choice((1, 3, 129)), draw.choice((0, 24, 40, 77)), _width(draw)
    out_dtype = draw.choice((torch.float32, torch.bfloat16, FLOAT8))
    left, right = _rows(draw, count, plain), _rows(draw, count, inner)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        first, second = _on(device, left, right)
        return [_dequantised(*function(first if plain else None, second, out_dtype))]

    return Case("concat_gelu", f"{count} x {plain} + {inner} to {_short(out_dtype)}", run, TOLERANCES[out_dtype])


class _Pages:
    """Keys and values of contexts over pages in any order, and what is known of them."""

    def __init__(
        self, draw: random.Random, groups: int, head_dim: int, lengths: list[int], dtype: torch.dtype
    ) -> None:
        self.size = draw.choice((3, 16))
        counts = [-(-length // self.size) for length in lengths]
        order = list(range(sum(counts)))
        draw.shuffle(order)
        self.scale = torch.tensor([0.25]) if dtype == FLOAT8 else None
        shape = (sum(counts), groups, self.size, head_dim)
        self.keys, self.values = (
            _rows(draw, *shape, dtype=dtype, size=4 if self.scale is not None else 1) for _ in "kv"
        )
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        angles = _rows(draw, max(lengths) + 1, head_dim // 4)
        self.cosine, self.sine = angles.cos(), angles.sin()


def _rotary_write_kv(draw: random.Random) -> Case:
    heads, groups, head_dim = _heads(draw)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    page_dtype = draw.choice((dtype, FLOAT8))
    count = draw.choice((1, 7, 50))
    pages = _Pages(draw, groups, head_dim, [count], page_dtype)
    places = torch.arange(count)
    slots = pages.table[0].long()[places // pages.size] * pages.size + places % pages.size
    qkv = _rows(draw, count, (heads + 2 * groups) * head_dim, dtype=dtype)
    factors = [_rows(draw, count, number, dtype=dtype) for number in (heads, groups)] if draw.random() < 0.5 else []

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        rows, keys, values = _on(device, qkv, pages.keys, pages.values)
        function(
            rows,
            *_on(device, places, pages.cosine, pages.sine),
            keys,
            values,
            *_on(device, slots, pages.scale, pages.scale, *(factors or (None, None))),
        )
        return [rows, keys.float(), values.float()]

    name = f"{count} x ({heads} + 2 x {groups}) x {head_dim} {_short(dtype)}, {_short(page_dtype)} pages"
    return Case("rotary_write_kv", name + (", scaled" if factors else ""), run, TOLERANCES[page_dtype])


def _prefill_attention(draw: random.Random) -> Case:
    heads, groups, head_dim = _heads(draw)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    chunks = [draw.choice((1, 9, 70, 150)) for _ in range(draw.randint(1, 3))]
    starts = [draw.choice((0, 5, 130)) for _ in chunks]
    pages = _Pages(draw, groups, head_dim, [start + 1 for start in starts], draw.choice((dtype, FLOAT8)))
    rows = _rows(draw, sum(chunks), heads + 2 * groups, head_dim, dtype=dtype)
    numbers = (
        torch.tensor([0, *chunks]).cumsum(0).int(),
        torch.tensor([start + chunk for start, chunk in zip(starts, chunks, strict=True)]).int(),
        torch.cat([_visible_until(draw, *lengths) for lengths in zip(starts, chunks, strict=True)]),
    )

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        (packed,) = _on(device, rows)
        return [
            function(
                *packed.split((heads, groups, groups), dim=1),
                *_on(device, pages.keys, pages.values, pages.table, *numbers),
                max(chunks),
                *_on(device, pages.scale, pages.scale),
            )
        ]

    kind = f"{_short(dtype)}, {_short(pages.keys.dtype)} pages"
    name = f"{heads} / {groups} heads of {head_dim} {kind}, chunks {chunks} from {starts}"
    return Case("prefill_attention", name, run, TOLERANCES[dtype])


def _visible_until(draw: random.Random, start: int, length: int) -> Tensor:
    """Up to where each position of a chunk attends, with spans of any length anywhere in it."""
    visible = torch.arange(start + 1, start + length + 1, dtype=torch.int32)
    first = draw.choice((0, 0, 1, 5))
    while first < length:
        end = min(length, first + draw.choice((1, 4, 33, 64)))
        visible[first:end] = start + end
        first = end + draw.choice((0, 3, 64))
    return visible


def _invariant_attention(draw: random.Random) -> Case:
    heads, groups, head_dim = _heads(draw)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    chunks = [draw.choice((1, 9, 70, 150)) for _ in range(draw.randint(1, 3))]
    lengths = [draw.choice((0, 5, 130)) + chunk for chunk in chunks]
    pages = _Pages(draw, groups, head_dim, lengths, draw.choice((dtype, FLOAT8)))
    query = _rows(draw, sum(chunks), heads, head_dim, dtype=dtype)
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    visible = [_visible_until(draw, length - chunk, chunk) for chunk, length in zip(chunks, lengths, strict=True)]
    numbers = (starts, torch.tensor(lengths).int(), torch.cat(visible))

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [
            function(
                *_on(device, query, pages.keys, pages.values, pages.table, *numbers),
                max(chunks),
                *_on(device, pages.scale, pages.scale),
            )
        ]

    kind = f"{_short(dtype)}, {_short(pages.keys.dtype)} pages"
    name = f"{heads} / {groups} heads of {head_dim} {kind}, chunks {chunks} up to {lengths}"
    return Case("invariant_attention", name, run, TOLERANCES[dtype])


def _matrix(draw: random.Random, num_rows: int, width: int) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """A weight, its scale where it is float8, and the type of activations that go with it."""
    dtype = draw.choice((torch.float32, torch.bfloat16, FLOAT8))
    if dtype != FLOAT8:
        return _rows(draw, num_rows, width, dtype=dtype, size=width**-0.5), None, dtype
    return (
        _rows(draw, num_rows, width, dtype=dtype, size=40),
        (1 + _rows(draw, num_rows).abs()) / 40 / width**0.5,
        torch.float16,
    )


def _decode_expand(draw: random.Random) -> Case:
    # Of a row of a few values that are nearly equal, rounding is most of what is left after its mean.
    batch, width = draw.choice((1, 1, 2, 5, 33, 64)), draw.choice((max(_width(draw), 9), 2048, 2056))
    plain, activated = draw.choice((24, 40, 77, 144)), draw.choice((0, 8, 77, 104))
    weight, scale, dtype = _matrix(draw, plain + activated, width)
    hidden, bias = _rows(draw, batch, width) + 0.1, _rows(draw, plain + activated)
    sums = (weight.float() if scale is None else weight.float() * scale[:, None]).sum(dim=1)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        outs = [torch.full((batch, number), torch.nan, dtype=dtype, device=device) for number in (plain, activated)]
        function(*_on(device, hidden, weight, scale, sums, bias), _EPSILON, plain, *outs)
        return outs

    name = f"{batch} x {width} to {plain} + {activated} {_short(weight.dtype)}"
    return Case("decode_expand", name, run, TOLERANCES[dtype])


def _decode_contract(draw: random.Random) -> Case:
    batch, width, num_rows = (
        draw.choice((1, 1, 2, 5, 33, 64)),
        draw.choice((_width(draw), 4104, 10_240)),
        _width(draw),
    )
    weight, scale, dtype = _matrix(draw, num_rows, width)
    activations, bias, hidden = (
        _rows(draw, batch, width, dtype=dtype),
        _rows(draw, num_rows),
        _rows(draw, batch, num_rows),
    )

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        (stream,) = _on(device, hidden)
        function(*_on(device, activations, weight, scale, bias), stream)
        return [stream]

    return Case("decode_contract", f"{batch} x {width} to {num_rows} {_short(weight.dtype)}", run, 1e-4)


def _rotary_decode_attention(draw: random.Random) -> Case:
    heads, groups, head_dim = _heads(draw)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    page_dtype = draw.choice((dtype, FLOAT8))
    positions = [draw.choice((-1, 0, 5, 64, 200, 399)) for _ in range(draw.choice((1, 3, 9)))]
    pages = _Pages(draw, groups, head_dim, [max(position, 0) + 1 for position in positions], page_dtype)
    batch, num_parts = len(positions), draw.choice((1, 3, 8))
    qkv = _rows(draw, batch, (heads + 2 * groups) * head_dim, dtype=dtype)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        keys, values = _on(device, pages.keys, pages.values)
        out = torch.full((batch, heads * head_dim), torch.nan, dtype=dtype, device=device)
        partials = torch.full((batch, heads, num_parts, head_dim + 2), torch.nan, device=device)
        counters = torch.zeros(batch, heads, dtype=torch.int32, device=device)
        function(
            *_on(device, qkv, torch.tensor(positions), pages.cosine, pages.sine),
            keys,
            values,
            *_on(device, pages.table),
            out,
            *_on(device, pages.scale, pages.scale),
            None,
            None,
            partials,
            counters,
        )
        return [out, keys.float(), values.float(), counters]

    name = f"{heads} / {groups} heads of {head_dim} {_short(dtype)}, {_short(page_dtype)} pages, at {positions}"
    return Case("rotary_decode_attention", name, run, TOLERANCES[page_dtype])


def _crop_attention(draw: random.Random) -> Case:
    patches, head_dim = draw.choice(((9, 72), (49, 24), (97, 24), (200, 72), (192, 16), (20, 3), (300, 40)))
    dtype, heads, crops = draw.choice(_SHORT), draw.choice((1, 3)), draw.choice((1, 5))
    packed = _rows(draw, crops * patches, 3 * heads * head_dim, dtype=dtype)
    out_scale = draw.choice((None, 1 / 448))

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [function(*_on(device, packed), patches, heads, out_scale)]

    name = f"{crops} crops of {patches}, {heads} heads of {head_dim} {_short(dtype)}" + (
        " to float8" if out_scale else ""
    )
    return Case("crop_attention", name, run, TOLERANCES[dtype] if out_scale is None else TOLERANCES[FLOAT8])


def _scaled_linear(draw: random.Random) -> Case:
    count, dtype = draw.choice((1, 7, 70)), draw.choice((torch.float32, torch.bfloat16, FLOAT8))
    width, num_rows = _width(draw), _width(draw)
    if dtype == FLOAT8:
        width, num_rows = 16 * draw.randint(1, 20), 16 * draw.randint(1, 20)
    out_dtype = torch.bfloat16 if dtype == FLOAT8 else dtype
    size = 40 if dtype == FLOAT8 else 1
    x, weight = (
        _rows(draw, count, width, dtype=dtype, size=size),
        _rows(draw, num_rows, width, dtype=dtype, size=size),
    )
    scales = (
        (_rows(draw, count, 1).abs() / 40, _rows(draw, num_rows).abs() / 40) if dtype == FLOAT8 else (None, None)
    )
    bias = _rows(draw, num_rows, dtype=out_dtype)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [function(*_on(device, x, scales[0], weight, scales[1], bias), out_dtype)]

    name = f"{count} x {width} to {num_rows} {_short(dtype)}"
    # cuBLAS may multiply float32 in another order; float8 is summed with fast accumulation.
    return Case("scaled_linear", name, run, max(TOLERANCES[out_dtype], 1e-4))


def _invariant_linear(draw: random.Random) -> Case:
    count, dtype = draw.choice((1, 7, 70, 150)), draw.choice((torch.float32, torch.bfloat16))
    width, num_rows = draw.choice((_width(draw), 2200)), _width(draw)
    rows, bias = _rows(draw, count, width, dtype=dtype), draw.choice((None, _rows(draw, num_rows, dtype=dtype)))
    weight = _rows(draw, num_rows, width, dtype=dtype)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [function(*_on(device, rows, weight, bias))]

    return Case("invariant_linear", f"{count} x {width} to {num_rows} {_short(dtype)}", run, TOLERANCES[dtype])


def _whole_products(draw: random.Random) -> Case:
    dtype = draw.choice((FLOAT8, torch.bfloat16))
    multiple = 16 if dtype == FLOAT8 else 8
    count, width, num_rows = (
        draw.choice((16, 48, 729)),
        multiple * draw.randint(1, 20),
        multiple * draw.randint(1, 20),
    )
    x, weight = (
        _rows(draw, rows, width, dtype=dtype, size=40 if dtype == FLOAT8 else 1) for rows in (count, num_rows)
    )
    scales = (torch.tensor([0.025]), torch.tensor([0.025 / width**0.5])) if dtype == FLOAT8 else (None, None)
    factor = torch.tensor([40.0]) if dtype == FLOAT8 else None
    operands = (x, scales[0], weight, scales[1])
    bias, hidden = _rows(draw, num_rows, dtype=torch.bfloat16), _rows(draw, count, num_rows, dtype=torch.bfloat16)
    name = f"{count} x {width} to {num_rows} {_short(dtype)}"

    def add(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        (stream,) = _on(device, hidden)
        function(*_on(device, *operands, bias), stream)
        return [stream]

    def gelu(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [function(*_on(device, *operands, bias, factor))]

    if draw.random() < 0.5:
        return Case("scaled_linear_add", name, add, TOLERANCES[torch.bfloat16], needs_cuda=True)
    return Case("scaled_linear_gelu", name, gelu, TOLERANCES[dtype], needs_cuda=True)


def _mixture_of_experts(draw: random.Random) -> Case:
    count, experts = draw.choice((1, 5, 40)), draw.choice((2, 6))
    dim, inner = draw.choice(((32, 16), (40, 20), (36, 24), (17, 7), (128, 48)))
    dtype = draw.choice((torch.bfloat16, torch.float32))
    hidden, logits = _rows(draw, count, dim, dtype=dtype), _rows(draw, count, experts)
    up, down = (
        _rows(draw, experts, *shape, dtype=dtype, size=shape[1] ** -0.5)
        for shape in ((2 * inner, dim), (dim, inner))
    )

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [function(*_on(device, hidden, logits, up, down), 2)]

    name = f"{count} x {dim}, {experts} experts of {inner} {_short(dtype)}"
    return Case("mixture_of_experts", name, run, 2 * TOLERANCES[dtype])


def _invariant_experts(draw: random.Random) -> Case:
    case = _mixture_of_experts(draw)
    return replace(case, operation="invariant_experts")


def _add_low_rank(draw: random.Random) -> Case:
    count, num_slots, rank = draw.randint(1, 40), draw.choice((1, 3, 8)), draw.choice((1, 4, 16))
    width, out_width = draw.choice(((32, 16), (17, 7), (128, 48)))
    dtype = draw.choice((torch.bfloat16, torch.float32))
    rows, out = _rows(draw, count, width, dtype=dtype), _rows(draw, count, out_width, dtype=dtype)
    down = _rows(draw, num_slots, rank, width, dtype=dtype, size=width**-0.5)
    up = _rows(draw, num_slots, rank, out_width, dtype=dtype, size=rank**-0.5)
    slots = torch.tensor([draw.randint(0, num_slots) for _ in range(count)])

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        changed, *others = _on(device, out.clone(), rows, down, up, slots)
        function(changed, others[0], LowRank(others[1], others[2]), others[3])
        return [changed]

    name = f"{count} x {width}, {num_slots} slots of rank {rank} {_short(dtype)}"
    return Case("add_low_rank", name, run, 2 * TOLERANCES[dtype])


class _AdaptedBlock:
    """Adapters of a decoder block, each of a rank of its own, and the rows of packed prompts that use them."""

    def __init__(self, draw: random.Random) -> None:
        self.count, self.dim = draw.choice((1, 5, 40, 130)), draw.choice((24, 40, 77))
        self.qkv, self.inner = draw.choice((24, 56)), draw.choice((17, 48))
        self.dtype = draw.choice((torch.bfloat16, torch.float32))
        ranks = [draw.choice((1, 3, 16, 33)) for _ in range(draw.choice((1, 3, 8)))]
        self.max_rank = max(ranks)
        self.ranks = torch.tensor([ranks] * 4, dtype=torch.int32)
        self.slots = torch.tensor([draw.randint(0, len(ranks)) for _ in range(self.count)])
        sizes = ((self.dim, self.qkv), (self.dim, self.inner), (self.dim, self.dim), (self.inner, self.dim))
        self._layers = [self._layer(draw, ranks, *size) for size in sizes]
        self._normed = _rows(draw, self.count, self.dim, dtype=self.dtype)
        self._flags = torch.tensor([False, *(draw.random() < 0.5 for _ in ranks)])
        self.name = f"{self.count} x {self.dim}, ranks {ranks} {_short(self.dtype)}"

    def _layer(self, draw: random.Random, ranks: list[int], width: int, outputs: int) -> tuple[Tensor, Tensor]:
        shape = len(ranks), max(ranks)
        a = _rows(draw, *shape, width, dtype=self.dtype, size=width**-0.5)
        b = _rows(draw, *shape, outputs, dtype=self.dtype, size=max(ranks) ** -0.5)
        for slot, rank in enumerate(ranks):
            a[slot, rank:] = b[slot, rank:] = 0
        return a, b

    def on(self, device: torch.device, rows: RowsBySlot | None = None) -> BlockLowRank:
        """The operand, with rows that an implementation has listed or that none has."""
        kinds = (0, 2, 1, 3)
        layers = [
            LowRank(a.to(device), b.to(device), kind) for (a, b), kind in zip(self._layers, kinds, strict=True)
        ]
        weight, bias = torch.ones(self.dim, device=device), torch.zeros(self.dim, device=device)
        flags, normed, slots = _on(device, self._flags, self._normed, self.slots)
        rows = rows or RowsBySlot(slots)
        return BlockLowRank(tuple(layers[:2]), tuple(layers[2:]), weight, bias, flags, normed, rows)


def _add_up_terms(draw: random.Random) -> Case:
    block = _AdaptedBlock(draw)
    product = _rows(draw, block.count, block.qkv + block.inner, dtype=block.dtype)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        (changed,) = _on(device, product)
        function(changed, block.on(device))
        return [changed]

    return Case("add_up_terms", block.name, run, 2 * TOLERANCES[block.dtype])


def _add_down_terms(draw: random.Random) -> Case:
    block = _AdaptedBlock(draw)
    out = _rows(draw, block.count, block.dim, dtype=block.dtype)
    rows, scale = _rows(draw, block.count, block.dim + block.inner, dtype=block.dtype), None
    if draw.random() < 0.5:
        rows, scale = reference.quantise_rows(rows)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        changed, own = _on(device, out, rows)
        function(changed, own, None if scale is None else scale.to(device), block.on(device))
        return [changed]

    return Case("add_down_terms", f"{block.name} {_short(rows.dtype)}", run, 2 * TOLERANCES[block.dtype])


def _rows_by_slot(draw: random.Random) -> Case:
    block = _AdaptedBlock(draw)
    product = _rows(draw, block.count, block.qkv + block.inner, dtype=block.dtype)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        changed, slots, ranks = _on(device, product, block.slots, block.ranks)
        rows = function(slots, ranks, block.max_rank, is_decode=False, dtype=block.dtype)
        add = reference.add_up_terms
        if rows.groups is not None:  # only the implementation that has made it reads it
            add = import_module("kestrel_ops.lora.triton_add_up_terms").add_up_terms
        add(changed, block.on(device, rows))
        return [rows.slots, changed]

    return Case("rows_by_slot", block.name, run, 2 * TOLERANCES[block.dtype])


def _philox_uniform(draw: random.Random) -> Case:
    count = draw.randint(1, 200)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    seeds = torch.randint(0, 2**62, (count,), generator=generator)
    counters = torch.randint(0, 2**31, (count,), generator=generator)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [function(*_on(device, seeds, counters))]

    return Case("philox_uniform", f"{count} rows", run, 0.0)


def _hash_words(draw: random.Random) -> Case:
    count, num_words = draw.randint(1, 4), draw.choice((1, 33, 4096, draw.randint(2, 20_000)))
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    words = torch.randint(-(2**31), 2**31, (count, num_words), generator=generator).int()
    multipliers = torch.randint(-(2**62), 2**62, (4, num_words), generator=generator)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return [function(*_on(device, words, multipliers))]

    return Case("hash_words", f"{count} x {num_words}", run, 0.0)


def _pick_allowed(draw: random.Random) -> Case:
    count, num_choices = draw.choice((1, 5, 64)), draw.choice((1, 77, 4096, draw.randint(2, 60_000)))
    logits = _rows(draw, count, num_choices, dtype=draw.choice((torch.float32, torch.bfloat16)))
    forbidden, rules = _rows(draw, 3, num_choices) < 0, (_rows(draw, count, 6) > 0).long()

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        operands = _on(device, logits, forbidden, rules)
        return [function(*operands[:2], operands[2][:, 2])]

    return Case("pick_allowed", f"{count} x {num_choices} {_short(logits.dtype)}", run, 0.0)


def _advance_rows(draw: random.Random) -> Case:
    count, has_values = draw.choice((1, 31, 64)), draw.random() < 0.5
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    table = torch.randint(0, 5, (2 * count, 12), generator=generator)
    successors = torch.randint(-1, 5, (5, 4), generator=generator)
    rows = torch.randperm(2 * count, generator=generator)[:count]
    ids, num_values = torch.randint(0, 5, (2, count), generator=generator)
    values, scores = _rows(draw, count, 2), _rows(draw, count, 1)
    given = (num_values, values, scores) if has_values else (None, None, None)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        own, *operands = _on(device, table, successors, rows, ids, *given, values[:, 0] > 0)
        return [function(own[:, :6], own.view(torch.float32)[:, 14:16], *operands), own]

    return Case("advance_rows", f"{count} rows{' with values' * has_values}", run, 0.0)


def _layer_norm_linear(draw: random.Random) -> Case:
    count, dim, outputs = draw.choice((1, 2, 5, 65)), max(_width(draw), 2), draw.choice((1, 7, 8, 64))
    dtype = draw.choice((torch.float32, torch.bfloat16))
    operands = [_rows(draw, count, dim), 1 + _rows(draw, dim, size=0.1, dtype=dtype), _rows(draw, dim, dtype=dtype)]
    linear = [_rows(draw, outputs, dim, dtype=dtype, size=dim**-0.5), _rows(draw, outputs, dtype=dtype)]

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return list(function(*_on(device, *operands), _EPSILON, *_on(device, *linear)))

    return Case("layer_norm_linear", f"{count} x {dim} to {outputs} {_short(dtype)}", run, TOLERANCES[dtype])


def _tau_scales(draw: random.Random) -> Case:
    count, width, heads = draw.choice((1, 2, 5, 65)), _width(draw), draw.choice((1, 3, 8, 32))
    dtype = draw.choice((torch.float32, torch.bfloat16))
    packed = _rows(draw, count, width, dtype=dtype)
    positions = torch.tensor([draw.randint(-1, 4000) for _ in range(count)])
    weights = [_rows(draw, heads, width, dtype=dtype, size=width**-0.5) for _ in range(2)]
    alpha = _rows(draw, heads, dtype=dtype)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        return list(function(*_on(device, packed, positions, *weights, alpha)))

    return Case("tau_scales", f"{count} x {width} for {heads} heads {_short(dtype)}", run, TOLERANCES[dtype])


def _resample(draw: random.Random) -> Case:
    height, width, length, dim = draw.randint(5, 90), draw.randint(5, 90), draw.randint(1, 70), draw.choice((0, 1))
    generator = torch.Generator().manual_seed(draw.getrandbits(48))
    channels = draw.choice((3, 4))
    pixels = torch.randint(0, 256, (height, width, channels), generator=generator, dtype=torch.uint8)
    first = torch.randint(0, (height, width)[dim] - 3, (1, length), generator=generator)
    weights = torch.randint(-(1 << 20), 1 << 21, (4, length), generator=generator)
    taps = torch.cat((first, weights)).int()
    side = min(length, (width, height)[dim])
    windows = torch.tensor([[0, 0]] * draw.randint(1, 3), dtype=torch.int32)

    def run(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
        operands = _on(device, pixels, taps, windows)
        return [function(*operands[:2], dim), function(*operands[:2], dim, operands[2], side)]

    return Case("resample", f"{height} x {width} to {length} along {dim}", run, TOLERANCES[torch.uint8])


def error(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest error relative to the largest value of its tensor; what is not finite counts as infinite."""
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        if other.numel():
            far = (one.cpu().double() - other.cpu().double()).abs().max().item()
            largest = other.double().abs().max().item()
            worst = max(worst, far / max(largest, 1e-12) if far == far else float("inf"))
    return worst


def are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two runs gave the same bits."""
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(left, right, strict=True)
    )
