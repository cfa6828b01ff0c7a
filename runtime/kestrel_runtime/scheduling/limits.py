"""The most work in one step; the defaults are what a device computes in a few hundredths of a second."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_runtime.api.config import EngineConfig


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The bounds of a step. Defaults depend on the kind of device."""

    max_batch_size: int
    """Sequences of a decode step."""
    max_prefill_tokens: int
    max_tiles: int
    cuts_at_share_points: bool = False
    """Whether a prompt has a new chunk where its image ends, so that pages of the image can be shared."""

    @classmethod
    def of(cls, config: EngineConfig, device_type: str) -> StepBounds:
        """The configured bounds; defaults where the configuration has none."""
        batch_size, prefill_tokens, tiles = (64, 8192, 72) if device_type == "cuda" else (16, 1024, 4)
        return cls(
            batch_size if config.max_batch_size is None else config.max_batch_size,
            prefill_tokens if config.max_prefill_tokens is None else config.max_prefill_tokens,
            tiles if config.max_tiles_per_step is None else config.max_tiles_per_step,
            config.prefix_cache,
        )
