"""How much one step may carry, by what a device does in a few hundredths of a second."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_runtime.api.config import EngineConfig


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The bounds of steps, with what the configuration leaves open filled in for a kind of device."""

    max_batch_size: int
    """Sequences."""
    max_prefill_tokens: int
    max_crops: int

    @classmethod
    def of(cls, config: EngineConfig, device_type: str) -> StepBounds:
        """The configured bounds, or those that suit the device."""
        batch_size, prefill_tokens, crops = (64, 8192, 72) if device_type == "cuda" else (16, 1024, 4)
        return cls(
            batch_size if config.max_batch_size is None else config.max_batch_size,
            prefill_tokens if config.max_prefill_tokens is None else config.max_prefill_tokens,
            crops if config.max_crops_per_step is None else config.max_crops_per_step,
        )
