"""A float32 model with random rounding: noise of the same relative size replaces every rounding of a path.

Its results differ from the exact ones as much as those of a correct implementation of the path: by the unit
roundoff of the format, carried through the layers of this model. The plain modules compute it for every path, so
that a fault in a fast path does not widen the tolerance of that path.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from kestrel_ops import has_float8_product
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.fused.weights import NUM_WIDE_BLOCKS, fused_blocks
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts
from kestrel_runtime.models.moondream.verify.formats import FLOAT8, Formats
from kestrel_runtime.models.moondream.verify.rounded_cache import RoundedCache
from kestrel_runtime.models.moondream.verify.tolerances import rounding_deviation

_ROUNDINGS_BETWEEN_PRODUCTS = 4
"""The most roundings of activations to the model's type between products: the result of a product with its bias,
the scaled or rotated value, the result of attention, activation or norm, and the input of the next product."""
_ROUNDINGS_IN_EXPERTS = 2 * _ROUNDINGS_BETWEEN_PRODUCTS + 2
"""Roundings to the model's type around both products of an expert, of its weights, and of the sum over experts."""
_PRODUCTS_OF_EXPERT = 2
_ADDITIONS_IN_BLOCK = 2


class RoundingNoise:
    """One simulation: its own random numbers, the same for the same seed."""

    def __init__(self, formats: Formats, seed: int, device: torch.device) -> None:
        self._formats = formats
        self._chance = torch.Generator(device).manual_seed(seed)

    @torch.inference_mode()
    def perturbed(self, model: Moondream) -> Moondream:
        """A copy of a float32 model with rounded weights whose activations are rounded as it runs.

        A single row is a decode step, whose activations are in the model's type or a wider one.
        """
        copied, formats = copy.deepcopy(model), self._formats
        short = self._float8_layers(model)
        for name, module in copied.named_modules():
            if isinstance(module, nn.Linear):
                self._round_linear(name, module, is_float8=name in short)
            elif isinstance(module, MixtureOfExperts):
                short_operands = sum(operand == FLOAT8 for operand in (formats.experts, formats.expert_weights))
                self._disturb_output(module, _ROUNDINGS_IN_EXPERTS, short_operands * _PRODUCTS_OF_EXPERT)
            elif name.rpartition(".")[0].endswith(".blocks"):
                self._disturb_output(module, _ADDITIONS_IN_BLOCK)
        for parameter in (copied.text.wte, copied.vision.pos_emb):
            self._round(parameter.data, formats.model)
        return copied

    def cache(self, config: TextConfig, num_pages: int, page_size: int) -> RoundedCache:
        """A float32 cache for the perturbed model that rounds to the cache's type."""
        return RoundedCache(config, num_pages, page_size, self._formats.cache, self._chance)

    def _float8_layers(self, model: Moondream) -> set[str]:
        """The linear layers whose products are in float8 on paths that use float8."""
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

    def _round_linear(self, name: str, layer: nn.Linear, *, is_float8: bool) -> None:
        weights = prompts = decoding = FLOAT8 if is_float8 else self._formats.model
        if name.startswith("text.blocks."):
            decoding = self._formats.model
            if is_float8 and int(name.split(".")[2]) < NUM_WIDE_BLOCKS:
                # Rounding of the weights of decode steps counts as rounding of their activations.
                weights, prompts, decoding = self._formats.model, self._formats.model, FLOAT8
        self._round(layer.weight.data, weights)
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

    def _disturb_output(self, module: nn.Module, num_roundings: int, num_short: int = 0) -> None:
        """Noise for the sum of roundings to the model's type and to float8."""
        formats = self._formats
        deviation = math.sqrt(
            num_roundings * rounding_deviation(formats.model) ** 2 + num_short * rounding_deviation(FLOAT8) ** 2
        )

        def disturb(_: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self._noisy(output, deviation)

        module.register_forward_hook(disturb)

    def _round(self, values: Tensor, dtype: torch.dtype) -> None:
        values.copy_(self._noisy(values, rounding_deviation(dtype)))

    def _noisy(self, values: Tensor, deviation: float) -> Tensor:
        # Uniform, as the error of a rounding. The standard deviation is the half width / sqrt(3).
        half_width = math.sqrt(3) * deviation
        factor = torch.empty_like(values).uniform_(1 - half_width, 1 + half_width, generator=self._chance)
        return factor.mul_(values)
