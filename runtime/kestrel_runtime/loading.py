"""From a configuration to a model in memory: device, dtype, checkpoint, tokenizer, room for the cache."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from kestrel_runtime.checkpoint import Checkpoint, find_checkpoint
from kestrel_runtime.config import EngineConfig
from kestrel_runtime.errors import CheckpointError
from kestrel_runtime.kv_cache import KVCache
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.weights import load_moondream_state
from kestrel_runtime.step_bounds import StepBounds
from kestrel_runtime.tokenizer import Tokenizer

_TYPICAL_CONTEXT_TOKENS = 2048

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and where it came from."""

    model: Moondream
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    num_parameters: int
    """Elements of all weights; the scales of float8 experts are not counted."""

    @classmethod
    def load(cls, config: EngineConfig) -> LoadedModel:
        """Find, read and place the checkpoint. Raises `CheckpointError`."""
        device, dtype = _device(config.device), config.dtype
        checkpoint = find_checkpoint(config.model, config.revision)
        model_config, state = load_moondream_state(checkpoint)
        model = Moondream.from_state(model_config, state, device, _dtype(dtype, device))
        tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
        if tokenizer.vocab_size > model_config.text.vocab_size:
            raise CheckpointError(
                f"{checkpoint.tokenizer_file} has {tokenizer.vocab_size} tokens, "
                f"the model only {model_config.text.vocab_size}"
            )
        _log.info("loaded %s on %s as %s", checkpoint.name, device, model.dtype)
        weights = (tensor for name, tensor in model.named_parameters() if not name.endswith(".scale"))
        return cls(model, tokenizer, checkpoint, sum(tensor.numel() for tensor in weights))

    def new_cache(self, config: EngineConfig) -> KVCache:
        """A cache of the configured size, or of what memory allows."""
        text, model = self.model.config.text, self.model
        dtype = torch.float8_e4m3fn if config.kv_dtype == "float8" else model.dtype
        num_pages = config.num_kv_pages
        if num_pages is None:
            context_pages = -(-min(text.max_context, _TYPICAL_CONTEXT_TOKENS) // config.page_size)
            bytes_per_page = KVCache.bytes_per_page(text, config.page_size, dtype)
            num_pages = int(_free_bytes(model.device) * config.kv_fraction) // bytes_per_page
            if model.device.type != "cuda":  # memory of the host is everybody's
                num_pages = min(num_pages, StepBounds.of(config, model.device.type).max_batch_size * context_pages)
            num_pages = max(num_pages, context_pages)
        return KVCache(text, num_pages, config.page_size, model.device, dtype)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device cuda was asked for, and torch finds none")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
