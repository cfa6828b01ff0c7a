"""Runs one request at a time through a model, token by token, and reads the tensors that fixtures contain.

Uses neither the engine thread nor the scheduler, so that tensors can be read between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Request
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.family import Prepare
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.backends import Backends
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.executor import new_step_runner
from kestrel_runtime.models.moondream.memory import new_cache
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch, Chunk, EncodeItem
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.sequence import TokenSequence

EMBEDDINGS = "image_embeddings_every_9th"
LOGITS = "query_prompt_logits"
HIDDEN = "query_prompt_last_hidden"
DECODED_HIDDEN = "query_prompt_last_hidden by a decode step"
"""Equal to `HIDDEN` in exact arithmetic. Fixtures contain only one of the two."""
_EVERY = 9
_NUM_ENDS = 8
_NUM_RUNS_WITH_GRAPHS = 3
"""The number of runs of each step: two direct ones, and one by its graph, whose result counts."""


def pages_of_context(model: Moondream, config: EngineConfig) -> int:
    """Returns the number of pages of the longest sequence."""
    return -(-model.config.text.max_context // config.page_size)


class PromptRun:
    """A runner of one sequence with a cache for its whole context. `begin` a request first."""

    def __init__(
        self,
        model: Moondream,
        config: EngineConfig,
        prepare: Prepare,
        cache: KVCache | None = None,
        adapters: AdapterSlabs | None = None,
    ) -> None:
        """Takes a `cache` of `pages_of_context` pages, which replaces the cache that `config` describes.

        A sequence uses `adapters` if it gets a lease of one.
        """
        self.model = model
        self._prepare = prepare
        self.cache = new_cache(model, config, pages_of_context(model, config)) if cache is None else cache
        execution = ExecutionConfig.of(config, model.device.type, model)
        self._backends = Backends.of(model, execution, max_batch_size=1)
        bounds = StepBounds(max_batch_size=1, max_prefill_tokens=model.config.text.max_context, max_crops=1)
        image_bytes = model.config.vision.num_image_tokens * model.config.text.dim * model.dtype.itemsize
        most_images = model.config.text.max_context // model.config.vision.num_image_tokens
        self._runner = new_step_runner(
            model,
            self.cache,
            execution,
            bounds,
            self._backends,
            image_cache_bytes=most_images * image_bytes,  # the sequence may hold the embeddings of all its images
            adapters=adapters,
        )
        self._sequence: TokenSequence | None = None
        self._num_runs = _NUM_RUNS_WITH_GRAPHS if execution.with_graphs else 1

    @property
    def sequence(self) -> TokenSequence:
        """Returns the request of the last `begin`."""
        assert self._sequence is not None, "begin a request first"
        return self._sequence

    def begin(self, request: Request) -> None:
        """Forgets the last request and prepares another."""
        if self._sequence is not None:
            self._runner.release(self._sequence)
        self._sequence = self._prepare(request)
        self._sequence.cache.pages = list(range(self.cache.num_pages))
        for entry, image in enumerate(self._sequence.images):
            image.entry = entry

    @property
    def image_embeddings(self) -> Tensor:
        """Returns image embeddings [image tokens, dim], once the prompt is in the cache."""
        return self._runner.image_embeddings(self.sequence)

    def prefill(self) -> Token:
        """Prefills the whole prompt in one chunk; returns the token sampled after it."""
        token = self._sampled_by(self._whole())
        self.sequence.cache.num_cached = self.sequence.length
        return token

    def decode(self, token: Token) -> Token:
        """Replaces the last sampled token by `token` and decodes it; returns the next token."""
        sequence = self.sequence
        self._append(token)
        # A sequence that starts its prompt writes its last token where the next step reads it. This writes the same
        # keys and values to the cache once more.
        prefix = Batch.of_prefill(prefill=[Chunk(sequence, 0, self._prefix_length, is_first=True)])
        sampled = self._sampled_by(prefix, Batch.of_decode([sequence]))
        sequence.cache.num_cached += 1
        return sampled

    def hidden_after(self, tokens: Iterable[Token]) -> Tensor:
        """Prefills the prompt and `tokens` in one chunk; returns the hidden state for the next token, [1, dim]."""
        for token in tokens:
            self._append(token)
        hidden = [self._runner.last_hidden(self._whole()) for _ in range(self._num_runs)][-1]
        self.sequence.cache.num_cached = self.sequence.length
        return hidden

    @torch.inference_mode()
    def decoded_hidden(self) -> Tensor:
        """Decodes the last token once more, without a captured graph; returns its hidden state, [1, dim].

        The state is that before the final LayerNorm.
        """
        device, sequence = self.model.device, self.sequence
        return self._backends.text.decode(
            self.model.embed(sequence.tokens[-1:]),
            torch.tensor([sequence.length - 1], device=device),
            torch.tensor([sequence.cache.pages], dtype=torch.int32, device=device),
            self.cache,
        )

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, float32 [heads, positions, head dimension] on the host."""
        pages = self.cache.layer(layer)
        both = ((pages.key_pages, pages.key_scale), (pages.value_pages, pages.value_scale))
        keys, values = (self._rows(stored, scale) for stored, scale in both)
        return keys, values

    def _sampled_by(self, *steps: Batch) -> Token:
        """Runs the step as often as configured; returns the token that the last run samples."""
        sampled: list[Token] = []
        for _ in range(self._num_runs):
            for step in steps:
                sampled = self._runner.run(step)
            while self._runner.capture_wanted():  # what has run twice without a graph
                pass
        (token,) = sampled
        return token

    @property
    def _prefix_length(self) -> int:
        """The end of the last span, or of the first token."""
        return self.sequence.spans[-1][1] if self.sequence.spans else 1

    def _append(self, token: Token) -> None:
        self.sequence.tokens.append(token)
        self.sequence.request.parser.consume(token)

    def _whole(self) -> Batch:
        sequence = self.sequence
        encode = [EncodeItem.rest_of(sequence, image) for image in sequence.images]
        return Batch.of_prefill(encode, [Chunk.of(sequence, 0, sequence.length)])

    @torch.inference_mode()
    def _rows(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        # torch cannot index float8 tensors on all devices.
        raw = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
        rows = (
            raw[self.sequence.cache.pages]
            .view(stored.dtype)
            .float()
            .transpose(0, 1)
            .flatten(1, 2)[:, : self.sequence.cache.num_cached]
        )
        return (rows if scale is None else rows * scale).cpu()


@torch.inference_mode()
def prompt_tensors(run: PromptRun, request: Request) -> dict[str, Tensor]:
    """Runs a prompt with an image through `run`; returns its tensors by name, in float32 on the CPU.

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
        prefix = rows[:, : run.sequence.spans[0][1]]
        named[f"last_layer_{letter}_first8"] = prefix[:, :_NUM_ENDS]
        named[f"last_layer_{letter}_last8"] = prefix[:, -_NUM_ENDS:]
    named[DECODED_HIDDEN] = run.decoded_hidden()[-1]
    return {name: tensor.float().cpu().clone() for name, tensor in named.items()}


def _interleaved(keys: Tensor, rotary_dim: int) -> Tensor:
    # The reference stores dimensions in the order 0, R/2, 1, R/2 + 1, …; this engine keeps both halves in place.
    pairs = keys[..., :rotary_dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, keys[..., rotary_dim:]), dim=-1)
