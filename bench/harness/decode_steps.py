"""Whole decode steps of random weights, timed: over batches, contexts, and types of weights and cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bench.harness.prefill_inputs import PAGE_SIZE, new_cache
from bench.harness.timing import Limits, attempted, time_us
from kestrel_ops import Kernels
from kestrel_ops.dispatch import implementation_of
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.fused.weights import FusedBlock, Matrix, fused_blocks, fused_head
from kestrel_runtime.models.moondream.text.decoder import TextModel, rotary_tables

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Contexts:
    """A batch whose contexts' lengths lie evenly between two, the ends included; one alone has the middle."""

    batch: int
    shortest: int
    longest: int

    def positions(self, device: torch.device) -> Tensor:
        """[B] int64: where the new tokens stand."""
        if self.batch == 1:
            return torch.tensor([(self.shortest + self.longest) // 2], device=device)
        return torch.linspace(self.shortest, self.longest, self.batch).long().to(device)

    def num_positions(self) -> int:
        """All positions that are attended to, the tokens' own included."""
        return int((self.positions(torch.device("cpu")) + 1).sum())

    def page_table(self, device: torch.device) -> Tensor:
        """[B, pages of the longest] int32: pages that lie anywhere."""
        most = self.longest // PAGE_SIZE + 1
        torch.manual_seed(self.batch)
        return torch.randperm(self.batch * most).view(self.batch, most).int().to(device)

    def filled_cache(self, config: TextConfig, device: torch.device, dtype: torch.dtype) -> KVCache:
        """Keys and values of deviation 1 in every page of every layer."""
        torch.manual_seed(self.longest)
        cache = new_cache(config, self.batch * (self.longest // PAGE_SIZE + 1), device, dtype)
        for layer in range(config.n_layers):
            pages = cache.layer(layer)
            for rows, scale in ((pages.key_pages, pages.key_scale), (pages.value_pages, pages.value_scale)):
                random = torch.randn(rows.shape, device=device, dtype=torch.bfloat16)
                rows.copy_(random if scale is None else random / scale)
        return cache


def dequantised(cache: KVCache, config: TextConfig) -> KVCache:
    """The same keys and values in float32."""
    wide = KVCache(config, cache.num_pages, cache.page_size, cache.device, torch.float32)
    for layer in range(config.n_layers):
        pages, own = cache.layer(layer), wide.layer(layer)
        own.key_pages.copy_(pages.key_pages.float() * (1.0 if pages.key_scale is None else pages.key_scale))
        own.value_pages.copy_(pages.value_pages.float() * (1.0 if pages.value_scale is None else pages.value_scale))
    return wide


class AttentionInputs:
    """One layer's attention: new tokens, pages, and workspace."""

    def __init__(
        self, config: TextConfig, contexts: Contexts, cache: KVCache, dtype: torch.dtype, num_parts: int
    ) -> None:
        device, batch = cache.device, contexts.batch
        self.cosine, self.sine = rotary_tables(config.rotary_dim, config.max_context, config.rope_theta, device)
        self.qkv = torch.randn(batch, config.qkv_dim, device=device).to(dtype)
        self.positions, self.page_table = contexts.positions(device), contexts.page_table(device)
        self.out = torch.full((batch, config.dim), torch.nan, device=device, dtype=dtype)
        self.partials = torch.empty(batch, config.n_heads, num_parts, config.head_dim + 2, device=device)
        self.counters = torch.zeros(batch, config.n_heads, dtype=torch.int32, device=device)
        self.cache = cache

    def run(self, operation: Callable[..., Any], layer: int = 0, **options: Any) -> tuple[Tensor, ...]:
        """What is attended to in one layer, [B, H * D]."""
        pages = self.cache.layer(layer)
        operation(
            self.qkv,
            self.positions,
            self.cosine,
            self.sine,
            pages.key_pages,
            pages.value_pages,
            self.page_table,
            self.out,
            pages.key_scale,
            pages.value_scale,
            None,
            None,
            self.partials,
            self.counters,
            **options,
        )
        return (self.out,)


Precision = Literal["model", "float8"]
OPERATIONS: tuple[str, ...] = ("decode_expand", "decode_contract", "rotary_decode_attention")


@dataclass(frozen=True, slots=True)
class Model:
    """One decoder in one precision."""

    config: TextConfig
    text: TextModel
    blocks: tuple[FusedBlock, ...]
    head: Matrix
    precision: Precision

    @classmethod
    def of(cls, text: TextModel, precision: Precision) -> Model:
        return cls(text.config, text, fused_blocks(text, precision), fused_head(text, precision), precision)

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.float16 if self.precision == "float8" else self.text.wte.dtype

    def weight_bytes(self) -> int:
        matrices = [matrix for block in self.blocks for matrix in (block.up, block.down)]
        return sum(matrix.weight.nbytes for matrix in [*matrices, self.head])

    def expert_bytes(self, batch: int) -> int:
        """Of the experts that so many tokens hit if all are alike."""
        moe = self.config.moe
        if moe is None:
            return 0
        share = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
        experts = [block.experts for block in self.blocks if block.experts is not None]
        stacks = [tensor for each in experts for part in (each.fc1, each.fc2) for tensor in part.parameters()]
        return round(share * sum(tensor.nbytes for tensor in stacks))


def without_dependent_launch(kernels: Kernels) -> Kernels:
    """The same kernels, those in Triton each started only when the one before has ended."""

    def wrapped(operation: str) -> Callable[..., Any]:
        function = getattr(kernels, operation)
        module = sys.modules[function.__module__]
        if implementation_of(function) != "triton":
            return function

        def launched(*arguments: Any) -> Any:
            if operation == "rotary_decode_attention":
                launch_config = module.config_for(len(arguments[0]), arguments[4].dtype)
            elif operation == "decode_expand":
                launch_config = module.config_for(len(arguments[0]), arguments[1].dtype, arguments[1].shape[1])
            else:
                launch_config = module.config_for(len(arguments[0]), arguments[1].dtype)
            if hasattr(launch_config, "dependent_launch"):
                launch_config = replace(launch_config, dependent_launch=False)
            return function(*arguments, config=launch_config)

        return launched

    return replace(kernels, **{operation: wrapped(operation) for operation in OPERATIONS})


@torch.no_grad()
def time_step(kernels: Kernels, model: Model, contexts: Contexts, cache: KVCache, has_own_head: bool) -> float:
    """Microseconds of a whole step: blocks, head and the largest logit."""
    device, config = model.text.wte.device, model.config
    decoder = FusedDecoder(model.text, model.blocks, kernels)
    workspace = decoder.workspace(contexts.batch)
    embeddings = torch.randn(contexts.batch, config.dim, device=device).bfloat16()
    positions, table = contexts.positions(device), contexts.page_table(device)
    logits = torch.empty(contexts.batch, config.vocab_size, device=device, dtype=torch.bfloat16)
    chosen = torch.empty(contexts.batch, dtype=torch.int64, device=device)

    def step() -> None:
        hidden = decoder.forward(embeddings, positions, table, cache, workspace)
        if has_own_head:
            decoder.logits(hidden, model.head, logits)
            torch.argmax(logits, dim=1, out=chosen)
        else:
            torch.argmax(model.text.logits(hidden.bfloat16()), dim=1, out=chosen)

    return time_us([step], rounds=4)


def time_steps(
    kernels: Kernels, model: Model, limits: Limits, ranges: list[tuple[int, int]], batches: list[int]
) -> list[dict[str, Any]]:
    """A table of whole steps over batches, contexts and types of cache."""
    rows: list[dict[str, Any]] = []
    config, device = model.config, model.text.wte.device
    print(f"\nWhole steps, {model.precision} weights: ms, limit, tokens/s")
    for shortest, longest in ranges:
        for cache_dtype in (torch.bfloat16, FLOAT8):
            for batch in batches:
                contexts = Contexts(batch, shortest, longest)
                name = f"{model.precision} {str(cache_dtype)[6:]} {shortest}..{longest} batch {batch}"
                with attempted(f"step {name}"):
                    cache = contexts.filled_cache(config, device, cache_dtype)
                    us = time_step(kernels, model, contexts, cache, True)
                    others = {"plain head": time_step(kernels, model, contexts, cache, False)}
                    # Two batches are enough to see what it gives, and compiling takes its time.
                    if batch in (1, 64) and model.precision == "float8":
                        other = without_dependent_launch(kernels)
                        others["no dependent launch"] = time_step(other, model, contexts, cache, True)
                    limit = step_limit_us(model, contexts, cache_dtype, limits)
                    rows.append(
                        {
                            "precision": model.precision,
                            "cache": str(cache_dtype)[6:],
                            "contexts": [shortest, longest],
                            "batch": batch,
                            "us": us,
                            "others_us": others,
                            "limit_us": limit,
                        }
                    )
                    print(
                        f"  {name:<44}{us / 1e3:>8.3f}  limit {limit / 1e3:.3f}  {us / limit:.2f}x"
                        f"  {batch / us * 1e6:>8.0f}   "
                        + ", ".join(f"{what} {other / 1e3:.3f}" for what, other in others.items()),
                        flush=True,
                    )
    return rows


def step_limit_us(model: Model, contexts: Contexts, cache_dtype: torch.dtype, limits: Limits) -> float:
    """Microseconds that a copy of a step's weights, keys and values takes."""
    config = model.config
    per_position = 2 * config.n_layers * config.n_kv_heads * config.head_dim * cache_dtype.itemsize
    size = model.weight_bytes() + model.expert_bytes(contexts.batch) + contexts.num_positions() * per_position
    return size / limits.copy_bytes_per_s * 1e6


def time_contexts(
    kernels: Kernels, model: Model, limits: Limits, lengths: list[int], batches: list[int]
) -> list[dict[str, Any]]:
    """Whole steps of sequences that are all equally long, with keys and values in float8."""
    rows: list[dict[str, Any]] = []
    print(f"\nOver contexts, {model.precision} weights, float8 cache: ms, limit")
    for batch in batches:
        for length in lengths:
            contexts = Contexts(batch, length, length)
            name = f"{model.precision} batch {batch} context {length}"
            with attempted(f"step {name}"):
                cache = contexts.filled_cache(model.config, model.text.wte.device, FLOAT8)
                us = time_step(kernels, model, contexts, cache, False)
                limit = step_limit_us(model, contexts, FLOAT8, limits)
                rows.append(
                    {
                        "precision": model.precision,
                        "at_once": f"batch {batch}",
                        "context": length,
                        "us": us,
                        "limit_us": limit,
                    }
                )
                print(f"  {name:<44}{us / 1e3:>8.3f}  limit {limit / 1e3:.3f}  {us / limit:.2f}x", flush=True)
    return rows
