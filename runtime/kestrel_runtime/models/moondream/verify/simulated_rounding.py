"""Simulates rounding: the errors that a correct backend in a shorter format has for one model and one prompt.

The plain model runs in float32 with random rounding. Noise of the relative size of a rounding replaces each
rounding of weights and activations; cached keys and values are really rounded. The errors of such a run are those
of a correct backend, because they have passed through the same layers. The backend under test takes no part, so a
fault does not loosen its own bound. docs/numerics.md has the derivation.

A fixture does not hold these errors. It holds the answers of a reference; the errors differ by precision and
backend.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from kestrel_ops import has_float8_product, write_kv
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Request
from kestrel_runtime.execution.kv_cache import DecodeAttention, KVCache, PrefillAttention
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.family import Prepare, plain_float32
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.fused.weights import NUM_WIDE_BLOCKS, fused_blocks
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun, pages_of_context, prompt_tensors
from kestrel_runtime.models.moondream.verify.routing import Routing
from kestrel_runtime.models.moondream.verify.tolerances import NUM_SIMULATIONS, ExpectedError, rounding_deviation

FLOAT8 = torch.float8_e4m3fn
ExpertWeights = torch.dtype | Literal["int4"]
_NAMES: dict[ExpertWeights, str] = {FLOAT8: "float8"}
_ROUNDED: dict[str, ExpertWeights] = {"float8": FLOAT8, "int4": "int4"}
_ROUNDINGS_BETWEEN_PRODUCTS = 4
"""The most roundings of activations to the model's type between products: the result of a product with its bias,
the scaled or rotated value, the result of attention, activation or norm, and the input of the next product."""
_ROUNDINGS_IN_EXPERTS = 2 * _ROUNDINGS_BETWEEN_PRODUCTS + 2
"""Roundings to the model's type around both products of an expert, of its weights, and of the sum over experts."""
_PRODUCTS_OF_EXPERT = 2
_ADDITIONS_IN_BLOCK = 2


@dataclass(frozen=True, slots=True)
class Formats:
    """The types in which a backend stores its numbers."""

    model: torch.dtype
    """The type of results, activations between products, the residual stream, and all weights not listed below."""
    text: torch.dtype
    """The type of the operands of the decoder blocks' products, if their sizes allow it, except experts."""
    experts: torch.dtype
    """The type of the input activations of experts' products."""
    expert_weights: ExpertWeights
    """The type to which loading has quantised the experts' weights; unchanged weights, as in float8, are exact."""
    vision: torch.dtype
    """The type of the operands of the encoder's and the projector's products, if their sizes allow it."""
    cache: torch.dtype
    """The type of cached keys and values."""
    reads_own_from_cache: bool = field(default=False, kw_only=True)
    """True if a chunk of a prompt attends to its own keys and values as the cache stores them, rounded."""

    @classmethod
    def of(cls, config: EngineConfig, model: Moondream) -> Formats:
        """Returns the types of `config` for a loaded model."""

        def operands(setting: str) -> torch.dtype:
            return FLOAT8 if setting.endswith("float8") else model.dtype

        # On fused backends on a GPU the inputs of experts of 8 and 4 bits are rounded to float8.
        rounds_for_experts = (
            model.expert_format != "model" and config.text_backend != "plain" and model.device.type == "cuda"
        )
        errors = (error for both in model.expert_errors.values() for error in both)
        return cls(
            model=model.dtype,
            text=operands(config.text_backend),
            experts=FLOAT8 if rounds_for_experts and model.dtype != torch.float32 else model.dtype,
            expert_weights=_ROUNDED[model.expert_format] if any(errors) else model.dtype,
            vision=operands(config.vision_backend),
            cache=operands(config.kv_dtype),
            reads_own_from_cache=config.deterministic
            or (config.text_backend != "plain" and ("prefill_attention", "flashinfer") in config.kernels),
        )

    @property
    def shortest(self) -> ExpertWeights:
        """Returns the format with the largest rounding errors."""
        formats: tuple[ExpertWeights, ...] = (
            self.model,
            self.text,
            self.experts,
            self.expert_weights,
            self.vision,
            self.cache,
        )
        return max(formats, key=rounding_deviation)

    @property
    def name(self) -> str:
        """Returns the name of the shortest type, as in flags."""
        return _NAMES.get(self.shortest, str(self.shortest).removeprefix("torch."))

    @property
    def experts_deviation(self) -> float:
        """Returns the deviation of an expert's result because of formats shorter than the model's."""
        formats: tuple[ExpertWeights, ...] = (self.experts, self.expert_weights)
        squares = (rounding_deviation(each) ** 2 for each in formats if each != self.model)
        return math.sqrt(_PRODUCTS_OF_EXPERT * sum(squares))


class RoundingNoise:
    """Random rounding of a float32 model, one simulation after another.

    `model` is a copy whose activations are rounded as it runs. A single row is a decode step, whose activations are
    in the model's type or a wider one. `begin` a simulation first.
    """

    def __init__(self, formats: Formats, model: Moondream) -> None:
        self._formats = formats
        self._chance = torch.Generator(model.device)
        self.model = copy.deepcopy(model)
        self._weights: list[tuple[Tensor, Tensor, torch.dtype]] = []  # of the copy, of the original, rounded to
        short = self._float8_layers(model)
        for (name, module), own in zip(self.model.named_modules(), model.modules(), strict=True):
            if isinstance(module, nn.Linear):
                self._round_linear(name, module, own.get_parameter("weight"), is_float8=name in short)
            elif isinstance(module, MixtureOfExperts):
                self._disturb_output(module, _ROUNDINGS_IN_EXPERTS, formats.experts_deviation)
            elif name.rpartition(".")[0].endswith(".blocks"):
                self._disturb_output(module, _ADDITIONS_IN_BLOCK)
        self._weights += [
            (self.model.text.wte, model.text.wte, formats.model),
            (self.model.vision.pos_emb, model.vision.pos_emb, formats.model),
        ]

    @torch.inference_mode()
    def begin(self, seed: int, num_pages: int, page_size: int) -> RoundedCache:
        """Rounds the weights of `model` anew; returns a float32 cache for it that rounds to the cache's type.

        Equal seeds give equal simulations.
        """
        self._chance.manual_seed(seed)
        cache = RoundedCache(self.model.config.text, num_pages, page_size, self._formats, self._chance)
        for copied, original, dtype in self._weights:
            copied.copy_(self._noisy(original, rounding_deviation(dtype)))
        return cache

    def _float8_layers(self, model: Moondream) -> set[str]:
        """Returns the linear layers whose products are in float8 in backends that use float8."""
        names: set[str] = set()
        if self._formats.text == FLOAT8:
            for layer, block in enumerate(fused_blocks(model.text, "float8")):
                for matrix, parts in ((block.up, ("attn.qkv", "mlp.fc1")), (block.down, ("attn.proj", "mlp.fc2"))):
                    if matrix.scale is not None:
                        names.update(f"text.blocks.{layer}.{part}" for part in parts)
        if self._formats.vision == FLOAT8:
            for name, module in model.vision.named_modules():
                if isinstance(module, nn.Linear) and has_float8_product(*module.weight.shape):
                    names.add(f"vision.{name}")
        return names - {"vision.patch_emb"}

    def _round_linear(self, name: str, layer: nn.Linear, original: Tensor, *, is_float8: bool) -> None:
        weights = prompts = decoding = FLOAT8 if is_float8 else self._formats.model
        if name.startswith("text.blocks."):
            decoding = self._formats.model
            if is_float8 and int(name.split(".")[2]) < NUM_WIDE_BLOCKS:
                # Rounding of the weights of decode steps counts as rounding of their activations.
                weights, prompts, decoding = self._formats.model, self._formats.model, FLOAT8
        self._weights.append((layer.weight, original, weights))
        self._disturb_input(layer, prompts, decoding)

    def _disturb_input(self, module: nn.Module, prompts: torch.dtype, decoding: torch.dtype) -> None:
        of_many, of_one = self._deviation_of_input(prompts), self._deviation_of_input(decoding)

        def disturb(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            rows = inputs[0]
            return (self._noisy(rows, of_one if len(rows) == 1 else of_many), *inputs[1:])

        module.register_forward_pre_hook(disturb)

    def _deviation_of_input(self, operands: torch.dtype) -> float:
        is_shorter = operands != self._formats.model
        own = rounding_deviation(operands) ** 2 if is_shorter else 0.0
        return math.sqrt(own + _ROUNDINGS_BETWEEN_PRODUCTS * rounding_deviation(self._formats.model) ** 2)

    def _disturb_output(self, module: nn.Module, num_roundings: int, more: float = 0.0) -> None:
        """Returns noise for the sum of roundings to the model's type and of further ones with this deviation."""
        deviation = math.sqrt(num_roundings * rounding_deviation(self._formats.model) ** 2 + more**2)

        def disturb(_: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self._noisy(output, deviation)

        module.register_forward_hook(disturb)

    def _noisy(self, values: Tensor, deviation: float) -> Tensor:
        # Uniform, as the error of a rounding. The standard deviation is the half width / sqrt(3).
        half_width = math.sqrt(3) * deviation
        factor = torch.empty_like(values).uniform_(1 - half_width, 1 + half_width, generator=self._chance)
        return factor.mul_(values)


class RoundedCache(KVCache):
    """A float32 cache that rounds to the grid of a shorter type, which is scaled at random for each channel.

    Rounding errors of a cache are not independent: positions with nearly equal keys or values, such as those of a
    plain background, have nearly equal errors, which attention does not average out. Independent noise would not
    show this. Numbers are rounded instead: equal numbers have equal errors, and errors of different channels and
    simulations are independent.

    For plain backends. Chunks attend to their own keys and values as a backend of these formats does, unrounded or
    rounded, and decoded tokens attend to rounded ones.
    """

    def __init__(
        self, config: TextConfig, num_pages: int, page_size: int, formats: Formats, chance: torch.Generator
    ) -> None:
        super().__init__(config, num_pages, page_size, chance.device, torch.float32)
        self._rounded_to = formats.cache
        self._reads_own = formats.reads_own_from_cache
        # Scales of keys and of values. A factor of 2 maps the grid to itself, so scales from 1 to 2 are enough.
        shape = (2, config.n_layers, config.n_kv_heads, config.head_dim)
        self._grids = torch.exp2(torch.rand(shape, device=chance.device, generator=chance) - 0.5)

    def rounded(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values as the cache stores them, [T, key/value heads, head dimension] float32."""
        keys, values = self._grids[:, layer]
        return (
            rounded_to_grid(key / keys, self._rounded_to) * keys,
            rounded_to_grid(value / values, self._rounded_to) * values,
        )

    def prefill(self, plan: PackedChunks) -> PrefillAttention:
        """Returns the attention of the base class, with stored keys and values rounded."""
        return _RoundedPrefill(self, plan, reads_own=self._reads_own)

    def decode(self, positions: Tensor, page_table: Tensor) -> DecodeAttention:
        """Returns the attention of the base class; stored keys and values are rounded before they are read."""
        return _RoundedDecode(self, positions, page_table)


class _RoundedPrefill(PrefillAttention):
    def __init__(self, cache: RoundedCache, plan: PackedChunks, *, reads_own: bool) -> None:
        super().__init__(cache, plan)
        self._rounded_cache = cache
        self._slots = plan.slots
        self._reads_own = reads_own

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = self._rounded_cache
        rounded = cache.rounded(layer, key, value)
        if self._reads_own:
            return super().__call__(layer, query, *rounded)
        attended = super().__call__(layer, query, key, value)
        write_kv(*rounded, cache.key_pages[layer], cache.value_pages[layer], self._slots)
        return attended


class _RoundedDecode(DecodeAttention):
    def __init__(self, cache: RoundedCache, positions: Tensor, page_table: Tensor) -> None:
        super().__init__(cache, positions, page_table)
        self._rounded_cache = cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().__call__(layer, query, *self._rounded_cache.rounded(layer, key, value))


def rounded_to_grid(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float32 values to the nearest values of `dtype`, as if its exponents had no upper limit.

    Numbers beyond the largest of `dtype` are not clipped: clipping is a fault, which tolerances must not cover.
    """
    info = torch.finfo(dtype)
    _, exponents = torch.frexp(values)  # |value| < 2 ** exponent
    _, smallest = math.frexp(info.smallest_normal)
    step = torch.ldexp(torch.full_like(values, info.eps / 2), exponents.clamp_min(smallest))
    return (values / step).round() * step


@dataclass(frozen=True, slots=True)
class PromptErrors:
    """The expected rounding errors of one prompt."""

    tensors: Mapping[str, ExpectedError]
    routing: Routing


def expected_errors(
    config: EngineConfig, formats: Formats, requests: Sequence[Request], prepare: Prepare
) -> list[PromptErrors]:
    """Runs each request exactly, then with random rounding, on the plain backend in float32 on `config.device`."""
    config = plain_float32(config)
    model = LoadedModel.load(config).model
    routings = [Routing() for _ in requests]
    exact: list[dict[str, Tensor]] = []
    run = PromptRun(model, config, prepare)
    for request, routing in zip(requests, routings, strict=True):
        with routing.recorded(model):
            exact.append(prompt_tensors(run, request))
    simulated: list[list[dict[str, Tensor]]] = [[] for _ in requests]
    noise = RoundingNoise(formats, model)
    for seed in range(NUM_SIMULATIONS):
        cache = noise.begin(seed, pages_of_context(model, config), config.page_size)
        run = PromptRun(noise.model, config, prepare, cache)
        for request, routing, samples in zip(requests, routings, simulated, strict=True):
            with routing.simulated(noise.model):
                samples.append(prompt_tensors(run, request))
    return [
        PromptErrors(
            {name: ExpectedError.of(tensor, [sample[name] for sample in samples]) for name, tensor in own.items()},
            routing,
        )
        for own, samples, routing in zip(exact, simulated, routings, strict=True)
    ]
