"""Computes the tensors of one prompt that reference fixtures contain."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_runtime.api.requests import Request
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun

EMBEDDINGS = "image_embeddings_every_9th"
LOGITS = "query_prompt_logits"
HIDDEN = "query_prompt_last_hidden"
DECODED_HIDDEN = "query_prompt_last_hidden by a decode step"
"""Equal to `HIDDEN` in exact arithmetic. Fixtures contain only one of the two."""
_EVERY = 9
_NUM_ENDS = 8


@torch.inference_mode()
def prompt_tensors(run: PromptRun, request: Request) -> dict[str, Tensor]:
    """Run a prompt with an image through `run`; its tensors by name, in float32 on the CPU.

    The prompt is prefilled in one chunk, then its last token is decoded with the cached positions before it.
    """
    run.begin(request)
    hidden = run.hidden_after(())
    named = {
        EMBEDDINGS: run.image_embeddings[::_EVERY],
        HIDDEN: hidden[-1],
        LOGITS: run.model.text.logits(hidden.to(run.model.dtype))[-1],
    }
    text = run.model.config.text
    keys, values = run.cached(text.n_layers - 1)
    for letter, rows in (("k", _interleaved(keys, text.rotary_dim)), ("v", values)):
        prefix = rows[:, : run.sequence.prefix_length]
        named[f"last_layer_{letter}_first8"] = prefix[:, :_NUM_ENDS]
        named[f"last_layer_{letter}_last8"] = prefix[:, -_NUM_ENDS:]
    named[DECODED_HIDDEN] = run.decoded_hidden()[-1]
    return {name: tensor.float().cpu().clone() for name, tensor in named.items()}


def _interleaved(keys: Tensor, rotary_dim: int) -> Tensor:
    # The reference stores dimensions in the order 0, R/2, 1, R/2 + 1, …; this engine keeps both halves in place.
    pairs = keys[..., :rotary_dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, keys[..., rotary_dim:]), dim=-1)
