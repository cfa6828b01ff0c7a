"""Lists the types to which a configuration rounds its numbers. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.moondream.model import Moondream

FLOAT8 = torch.float8_e4m3fn
_NAMES = {FLOAT8: "float8"}


@dataclass(frozen=True, slots=True)
class Formats:
    """The types in which a path stores its numbers."""

    model: torch.dtype
    """Of results, activations between products, the residual stream, and all weights not listed below."""
    text: torch.dtype
    """Of the operands of the decoder blocks' products, if their sizes allow it, except experts."""
    experts: torch.dtype
    """Of the input activations of experts' products."""
    expert_weights: torch.dtype
    """To which loading has rounded the experts' weights; those of a float8 checkpoint are exact."""
    vision: torch.dtype
    """Of the operands of the encoder's and the projector's products, if their sizes allow it."""
    cache: torch.dtype
    """Of cached keys and values."""

    @classmethod
    def of(cls, config: EngineConfig, model: Moondream) -> Formats:
        """The types of `config` for a loaded model."""

        def operands(setting: str) -> torch.dtype:
            return FLOAT8 if setting.endswith("float8") else model.dtype

        # On fused paths on a GPU the inputs of float8 experts are rounded to float8, too.
        has_float8_experts = any(parameter.dtype == FLOAT8 for parameter in model.text.parameters())
        rounds_for_experts = has_float8_experts and config.text_path != "plain" and model.device.type == "cuda"
        return cls(
            model=model.dtype,
            text=operands(config.text_path),
            experts=FLOAT8 if rounds_for_experts and model.dtype != torch.float32 else model.dtype,
            expert_weights=FLOAT8 if model.expert_errors else model.dtype,
            vision=operands(config.vision_path),
            cache=operands(config.kv_dtype),
        )

    @property
    def shortest(self) -> torch.dtype:
        """The type with the largest rounding errors."""
        types = (self.model, self.text, self.experts, self.expert_weights, self.vision, self.cache)
        return max(types, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def name(self) -> str:
        """The name of the shortest type, as in flags."""
        return _NAMES.get(self.shortest, str(self.shortest).removeprefix("torch."))
