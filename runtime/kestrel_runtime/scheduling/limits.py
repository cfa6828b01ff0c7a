"""Bounds the work in one step."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_runtime.api.config import EngineConfig

_PART_OF_OTHERS_ON_HOST = 16
"""The divisor of `max_prefill_tokens` for other tenants on a host, where each token would otherwise wait for a
whole step of their long prompts."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The bounds of a step."""

    max_batch_size: int
    """Sequences of a decode step."""
    max_prefill_tokens: int
    max_crops: int
    max_prefill_tokens_of_others: int | None = None
    """The most prompt tokens of tenants that were served more than another active tenant; None for no such
    limit."""
    shares_prefixes: bool = False
    """True if prompts may begin with pages of other sequences."""
    cuts_at_share_points: bool = False
    """True if a new chunk begins where the image of a prompt ends. The text then reads the image's positions from
    pages, as it does with shared pages."""

    @classmethod
    def of(cls, config: EngineConfig, device_type: str, free_bytes: float | None = None) -> StepBounds:
        """Returns the configured bounds, or those that `EngineConfig.resolved` chooses for the device.

        Prompts are cut where answers with and without the prefix cache are compared exactly: on a CPU and in
        float32. In shorter formats on a GPU a whole prompt in one chunk is 1.3% faster, and differs within the
        tolerance.
        """
        chosen = config.resolved(device_type, free_bytes)
        assert chosen.max_batch_size is not None
        assert chosen.max_prefill_tokens is not None
        assert chosen.max_crops_per_step is not None
        others = max(1, chosen.max_prefill_tokens // _PART_OF_OTHERS_ON_HOST)
        return cls(
            chosen.max_batch_size,
            chosen.max_prefill_tokens,
            chosen.max_crops_per_step,
            None if device_type == "cuda" else others,
            shares_prefixes=config.prefix_cache,
            cuts_at_share_points=config.prefix_cache and (device_type != "cuda" or config.dtype == "float32"),
        )
