"""Random prompts, weights, pages and experts at the sizes of a model: what parts of the prefill are timed on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.random_weights import KV_SCALE
from kestrel_ops.attention.triton_prefill_attention import Tiling, attend
from kestrel_ops.experts.reference_int4 import quantise_int4
from kestrel_ops.norms.reference import quantise_rows
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.text.decoder import ExpertFormat, TextModel, rotary_tables

FLOAT8 = torch.float8_e4m3fn
PAGE_SIZE = 16

_INT4_DEVIATION = 14.0  # of levels that are drawn alike


@dataclass(frozen=True, slots=True)
class Prompts:
    """How many prompts, how long, and how much of each is prefix."""

    count: int
    num_tokens: int
    prefix_length: int

    @property
    def num_rows(self) -> int:
        return self.count * self.num_tokens

    def plan(self, device: torch.device, start: int = 0) -> PackedChunks:
        """All of them from position `start` on, each over pages that lie anywhere."""
        most_pages = -(-self.num_tokens // PAGE_SIZE)
        table = torch.randperm(self.count * most_pages).view(self.count, most_pages)
        positions = torch.arange(start, self.num_tokens)
        slots = table[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        visible = torch.where(positions < self.prefix_length, self.prefix_length, positions + 1)
        count = self.num_tokens - start
        return PackedChunks(
            positions=positions.repeat(self.count).to(device),
            slots=slots.flatten().to(device),
            page_table=table.int().to(device),
            query_starts=(torch.arange(self.count + 1) * count).int().to(device),
            lengths=torch.full((self.count,), self.num_tokens, dtype=torch.int32, device=device),
            visible_until=visible.repeat(self.count).int().to(device),
            max_chunk=count,
        )

    def num_pages(self) -> int:
        return self.count * -(-self.num_tokens // PAGE_SIZE)

    def num_scores(self) -> int:
        """Pairs of positions that see each other, in all prompts."""
        behind = range(self.prefix_length, self.num_tokens)
        return self.count * (self.prefix_length**2 + sum(position + 1 for position in behind))


def random_text(config: TextConfig, device: torch.device) -> TextModel:
    """A bfloat16 decoder of random weights whose norms do something."""
    torch.manual_seed(1)
    with torch.device("meta"):
        model = TextModel(config)
    model = model.to_empty(device=device).bfloat16()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_gain = isinstance(module, torch.nn.LayerNorm) and name == "weight"
            parameter.data.normal_(1.0 if is_gain else 0.0, 0.2 if is_gain else 0.02)
    return model.eval().requires_grad_(False)


def random_text_with_experts(
    config: TextConfig, device: torch.device, expert_format: ExpertFormat = "float8"
) -> TextModel:
    """The same with experts of 8 or 4 bits, whose scales make their weights as large as all others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = TextModel(config, expert_format=expert_format)
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device=device)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dtype == FLOAT8:
            for expert in parameter.data:
                expert.copy_(torch.randn(expert.shape, device=device).mul_(40))
        elif parameter.dtype == torch.uint8:
            parameter.data.random_(256)
        elif name.endswith(".scale"):
            parameter.data.fill_(0.02 / (40 if expert_format == "float8" else _INT4_DEVIATION))
        else:
            is_gain = name.endswith("ln.weight")
            parameter.data.normal_(1.0 if is_gain else 0.0, 0.2 if is_gain else 0.02)
    return model.eval().requires_grad_(False)


def new_cache(config: TextConfig, num_pages: int, device: torch.device, dtype: torch.dtype) -> KVCache:
    """A cache whose float8 scales suit keys and values of deviation 1."""
    cache = KVCache(config, num_pages, PAGE_SIZE, device, dtype)
    for scales in (cache.key_scales, cache.value_scales):
        if scales is not None:
            scales.fill_(KV_SCALE)
    return cache


class PagedAttention:
    """Random queries, keys, values and pages of some prompts, as the attention and the writing take them."""

    def __init__(
        self, config: TextConfig, prompts: Prompts, device: torch.device, page_dtype: torch.dtype, start: int = 0
    ) -> None:
        self.config = config
        self.plan = prompts.plan(device, start)
        self.qkv = torch.randn(len(self.plan.positions), config.qkv_dim + config.ff_dim, device=device).bfloat16()
        shape = (prompts.num_pages(), config.n_kv_heads, PAGE_SIZE, config.head_dim)
        is_scaled = page_dtype == FLOAT8
        scale = torch.full((1,), KV_SCALE, device=device)
        self.scales = (scale, scale) if is_scaled else (None, None)
        deviation = 1 / KV_SCALE if is_scaled else 1.0
        keys, values = ((deviation * torch.randn(shape, device=device)).to(page_dtype) for _ in range(2))
        self.pages = (keys, values)
        self.tables = rotary_tables(config.rotary_dim, config.max_context, config.rope_theta, device)

    @property
    def heads(self) -> list[Tensor]:
        """Query, key and value: views of rows that are as wide as a product makes them."""
        width = self.config.n_kv_heads * self.config.head_dim
        rows = self.qkv[:, : self.config.qkv_dim]
        parts = rows.split((self.config.qkv_dim - 2 * width, width, width), dim=1)
        return [part.unflatten(1, (-1, self.config.head_dim)) for part in parts]

    def attend(self, operation: Callable[..., Tensor]) -> Tensor:
        plan = self.plan
        chunks = (plan.page_table, plan.query_starts, plan.lengths, plan.visible_until, plan.max_chunk)
        return operation(*self.heads, *self.pages, *chunks, *self.scales)

    def attend_tiled(self, tiles: Tiling) -> Tensor:
        plan = self.plan
        query, key, value = self.heads
        chunks = (plan.page_table, plan.query_starts, plan.lengths, plan.visible_until)
        pages = (self.pages[0], self.pages[1], self.scales[0], self.scales[1])
        return attend(query, key, value, pages, chunks, plan.max_chunk, tiles)

    def write(self, operation: Callable[..., Any]) -> None:
        """Turn and write in place."""
        qkv = self.qkv[:, : self.config.qkv_dim]
        operation(qkv, self.plan.positions, *self.tables, *self.pages, self.plan.slots, *self.scales)

    def everything(self) -> Tensor:
        """All that can be written, as one row of float32; pages in what they stand for."""
        scale = 1 if self.scales[0] is None else KV_SCALE
        return torch.cat([self.qkv.float().flatten(), *(scale * pages.float().flatten() for pages in self.pages)])


def random_experts(
    num_tokens: int, num_experts: int, dim: int, inner: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, router logits and both stacks of experts, bfloat16."""
    shapes = (num_tokens, dim), (num_tokens, num_experts), (num_experts, 2 * inner, dim), (num_experts, dim, inner)
    hidden, logits, up, down = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    return hidden, logits, up.mul_(dim**-0.5), down.mul_(inner**-0.5)


def int4_experts(up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Both stacks of experts in 4 bits, then their scales."""
    (up, up_scale), (down, down_scale) = (
        map(torch.stack, zip(*(quantise_int4(expert.float()) for expert in stack), strict=True))
        for stack in (up, down)
    )
    return up, down, up_scale, down_scale


def quantised_experts(
    hidden: Tensor, logits: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with float8 experts and their scales."""
    (up, up_scale), (down, down_scale) = quantise_rows(up), quantise_rows(down)
    return hidden, logits, up, down, up_scale[..., 0], down_scale[..., 0]
