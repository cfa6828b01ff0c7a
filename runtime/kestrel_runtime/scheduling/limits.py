"""The most work in one step; the defaults are what a device computes in a few hundredths of a second."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_runtime.api.config import MIB, EngineConfig

_ON_CUDA, _ON_HOST = (64, 8192, 72), (16, 1024, 4)
_PART_OF_OTHERS_ON_HOST = 16
"""On a host, a caller would wait with each token for a whole step of the others' long prompts."""
_HALF_BELOW, _QUARTER_BELOW = 12 * 1024 * MIB, 6 * 1024 * MIB
"""Memory of a GPU beside the weights. Activations, graphs and images of the largest steps take five GiB of it."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The bounds of a step. Defaults depend on the kind of device."""

    max_batch_size: int
    """Sequences of a decode step."""
    max_prefill_tokens: int
    max_tiles: int
    max_prefill_tokens_of_others: int | None = None
    """Of these tokens, those of tenants that were served more than another one that is active; None for all."""
    shares_prefixes: bool = False
    """Whether prompts may begin with pages of other sequences."""
    cuts_at_share_points: bool = False
    """Whether a prompt has a new chunk where its image ends, so that what follows reads the image's positions from
    pages, as it does where these are shared."""

    @classmethod
    def of(cls, config: EngineConfig, device_type: str, free_bytes: float | None = None) -> StepBounds:
        """The configured bounds; where the configuration has none, defaults, which are smaller on a CUDA device
        that has only `free_bytes` beside the weights.

        Prompts are cut where answers with and without the prefix cache are compared exactly: on a CPU and in
        float32. In shorter formats on a GPU a whole prompt in one chunk is 1.3% faster, and differs within the
        tolerance.
        """
        batch_size, prefill_tokens, tiles = _ON_CUDA if device_type == "cuda" else _ON_HOST
        if device_type == "cuda" and free_bytes is not None:
            part = 1 + (free_bytes < _HALF_BELOW) + 2 * (free_bytes < _QUARTER_BELOW)
            batch_size, prefill_tokens, tiles = batch_size // part, prefill_tokens // part, tiles // part
        if config.max_prefill_tokens is not None:
            prefill_tokens = config.max_prefill_tokens
        return cls(
            batch_size if config.max_batch_size is None else config.max_batch_size,
            prefill_tokens,
            tiles if config.max_tiles_per_step is None else config.max_tiles_per_step,
            None if device_type == "cuda" else max(1, prefill_tokens // _PART_OF_OTHERS_ON_HOST),
            shares_prefixes=config.prefix_cache,
            cuts_at_share_points=config.prefix_cache and (device_type != "cuda" or config.dtype == "float32"),
        )
