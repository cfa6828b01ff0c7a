"""A model family of the tests that reads images and finds places, as plain as it can be.

An image is the mean colours of its crops. Generic tests of the engine run on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kestrel_ops import Kernels
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import Box, CaptionOutput, DetectOutput, FinishReason, Output, TextDelta
from kestrel_runtime.api.requests import Caption, Chat, Detect, Role
from kestrel_runtime.execution.executor import DeviceMemory
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.sampling import TokenSampler
from kestrel_runtime.execution.step_inputs import DecodeInputs, PackedChunks, PrefillInputs
from kestrel_runtime.execution.step_runner import StateShape, StepRunner
from kestrel_runtime.imaging.crops import Crops
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule
from kestrel_runtime.scheduling.batch import EncodeItem
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.runtime.models.second_family.small_text import (
    PreparedSmallText,
    SmallText,
    SmallTextConfig,
    SmallTextExecutor,
    SmallTextFamily,
    SmallTextParser,
    SmallTextQuery,
)

KERNELS = Kernels.select("cpu", {})

NUM_IMAGE_TOKENS = 729
EOS_ID, PLACE_ID = 0, 5
"""The end of a list of boxes, and a token that carries a coordinate."""
_NUM_PLACES = 64
_CROP_PX = 16
_MAX_BOXES = 8


@dataclass(frozen=True)
class SmallPicturesConfig(SmallTextConfig):
    architecture: str = "small-pictures"
    positions_per_image: int = NUM_IMAGE_TOKENS


class SmallPictures(SmallText):
    """Beside the decoder: `colour` [3, 729 * dim], `place` [1, dim] and `places` [64, dim]."""

    def embed(self, ids: Tensor, num_values: Tensor, values: Tensor) -> Tensor:
        places = values[:, :1].to(self.dtype) @ self.weights["place"]
        return torch.where((num_values == 1)[:, None], places, self.weights["embedding"][ids])

    def encode(self, crops: Tensor) -> Tensor:
        """uint8 [crops, side, side, 3] → [crops, 729, dim]."""
        colours = (crops.to(self.dtype) / 255).mean((1, 2))
        return (colours @ self.weights["colour"]).unflatten(1, (NUM_IMAGE_TOKENS, -1))


class SmallPicturesExecutor(SmallTextExecutor):
    def __init__(self, model: SmallPictures, memory: DeviceMemory) -> None:
        super().__init__(model, memory)
        self._pictures = model
        self._encoded: dict[int, list[Tensor]] = {}

    def encode(self, items: Sequence[EncodeItem]) -> None:
        for item in items:
            crops = item.pixels
            assert isinstance(crops, Crops)
            if item.is_first:
                self._encoded[item.sequence.id] = []
            parts = self._encoded[item.sequence.id]
            parts.append(self._pictures.encode(torch.from_numpy(crops.pixels[list(item.crops)])))
            if item.is_last:
                self._memory.embeddings[item.entry] = torch.cat(self._encoded.pop(item.sequence.id)).mean(0)

    def prefill_hidden(self, inputs: PrefillInputs) -> Tensor:
        fields, memory = inputs.device, self._memory
        text = self._pictures.embed(fields.token_ids, fields.num_values, fields.token_values)
        images = memory.embeddings.flatten(0, 1)[fields.embedding_rows.clamp(min=0)]
        embeddings = torch.where((fields.embedding_rows >= 0)[:, None], images, text)
        attend = memory.cache.prefill(PackedChunks.of(inputs, memory.state))
        return self._pictures.attended(embeddings, fields.positions, attend)[fields.sample_tokens]

    def decode_hidden(self, inputs: DecodeInputs) -> Tensor:
        rows, positions, pages = inputs.device
        state, cache = self._memory.state, self._memory.cache
        state.add_pages(rows, positions, pages, cache.page_size)
        last = state.read(rows)
        embeddings = self._pictures.embed(last.token_ids, last.num_values, state.values(rows))
        attend = cache.decode(positions, state.page_table[rows, : inputs.size.max_pages])
        return self._pictures.attended(embeddings, positions, attend)

    def release(self, sequence: TokenSequence) -> None:
        self._encoded.pop(sequence.id, None)

    def forget_images(self) -> None:
        self._encoded.clear()

    def sample(self, hidden: Tensor, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        rows, needs = inputs.sample_rows, inputs.needs
        sampler = TokenSampler(self._memory.state, self._memory.rules, rows, needs, KERNELS)
        hidden = sampler.finite(hidden)
        ids = sampler.ids(self._pictures.logits(hidden))
        num_values, values = torch.zeros_like(ids), torch.zeros(len(ids), 1)
        if needs.value_kinds:
            places = sampler.pick((hidden @ self._pictures.weights["places"].T).float(), 1)
            num_values = (sampler.is_spatial & (ids == PLACE_ID)).long()
            values = (num_values * places / _NUM_PLACES)[:, None].float()
        return sampler.write(ids, num_values, values)


class CaptionParser(SmallTextParser):
    def output(self) -> Output:
        return CaptionOutput(self._text)


class BoxParser(OutputParser):
    """Four places for each box."""

    grammar = Grammar(
        (
            GrammarState(TokenRule(allowed=(PLACE_ID, EOS_ID), is_spatial=True), 1),
            *(GrammarState(TokenRule(allowed=(PLACE_ID,), is_spatial=True), then) for then in (2, 3, 0)),
        )
    )

    def __init__(self, max_boxes: int) -> None:
        self._max_boxes = max_boxes
        self._places: list[float] = []

    def parse(self, token: Token) -> list[TextDelta]:
        if token.id == EOS_ID:
            self.finish_reason = FinishReason.STOP
        else:
            self._places += token.value
        if len(self._places) == 4 * self._max_boxes:
            self.finish_reason = FinishReason.MAX_OBJECTS
        return []

    def output(self) -> Output:
        starts = range(0, len(self._places) - 3, 4)
        return DetectOutput(tuple(Box(*self._places[start : start + 4]) for start in starts))


class PicturesQuery(SmallTextQuery):
    defaults = SkillDefaults(temperature=0.2, top_p=0.9)

    def prompt(self, request: Any, tokenizer: Any, config: Any) -> Prompt:
        return Prompt([Token(id) for id in tokenizer.encode(f"Question: {request.question} Answer:")])


class PicturesChat(PicturesQuery):
    name, text_field = "chat", "messages"

    def prompt(self, request: Chat, tokenizer: Any, config: Any) -> Prompt:
        tokens: list[Token] = []
        image_places: list[int] = []
        answer_ends: list[int] = []
        for message in request.messages:
            image_places += [len(tokens)] * len(message.images)
            tokens += [Token(id) for id in tokenizer.encode(message.text)]
            if message.role is Role.ASSISTANT:
                answer_ends.append(len(tokens))
        return Prompt(tokens, tuple(image_places), tuple(answer_ends))


class PicturesCaption:
    name, text_field, defaults = "caption", "length", SkillDefaults(temperature=0.2, top_p=0.9)

    def prompt(self, request: Caption, tokenizer: Any, config: Any) -> Prompt:
        return Prompt([Token(id) for id in tokenizer.encode(f"a {request.length} caption")])

    def new_parser(self, request: Caption, tokenizer: Any, config: Any) -> OutputParser:
        return CaptionParser(tokenizer, request.sampling.max_tokens or 20)


class PicturesDetect:
    name, text_field = "detect", "object"
    defaults = SkillDefaults(temperature=0.0, top_p=1.0, max_objects=_MAX_BOXES)

    def prompt(self, request: Detect, tokenizer: Any, config: Any) -> Prompt:
        return Prompt([Token(id) for id in tokenizer.encode(request.object)])

    def new_parser(self, request: Detect, tokenizer: Any, config: Any) -> OutputParser:
        return BoxParser(request.max_objects or _MAX_BOXES)


class PicturesCropping:
    """Crops of 125 × 200 pixels and the whole image, each resized to 16 × 16."""

    crop_bytes, max_crops = 3 * _CROP_PX**2, 17

    def select(self, height_px: int, width_px: int) -> tuple[int, int]:
        return min(4, -(-height_px // 200)), min(4, -(-width_px // 125))

    def make_crops(self, image: Image.Image) -> Crops:
        rows, columns = self.select(image.height, image.width)
        whole = np.asarray(image.resize((_CROP_PX, _CROP_PX)))
        large = np.asarray(image.resize((columns * _CROP_PX, rows * _CROP_PX)))
        parts = (
            large.reshape(rows, _CROP_PX, columns, _CROP_PX, 3).swapaxes(1, 2).reshape(-1, _CROP_PX, _CROP_PX, 3)
        )
        return Crops(np.concatenate((whole[None], parts)), rows, columns)


@dataclass(frozen=True)
class PreparedPictures(PreparedSmallText):
    model: SmallPictures
    most_pages = 2048

    def new_step_runner(
        self, num_pages: int, graph_bytes: int, image_cache_bytes: int = 0, crop_cache_bytes: int = 0
    ) -> StepRunner:
        model, own = self.model, self.model.config
        cache = KVCache(own, num_pages, self.config.page_size, model.device, model.dtype)

        def value_kinds(grammar: Grammar) -> int:
            return int(any(rule.is_spatial and rule.lets_pass(PLACE_ID) for rule in grammar.rules))

        shape = StateShape(own.vocab_size, own.max_context, 1, NUM_IMAGE_TOKENS, own.dim, model.dtype, value_kinds)
        return StepRunner(
            lambda memory: SmallPicturesExecutor(model, memory),
            cache,
            shape,
            self.bounds,
            image_cache_bytes=image_cache_bytes,
        )


class SmallPicturesFamily(SmallTextFamily):
    def skills(self, config: Any) -> Mapping[str, Any]:
        return {
            "query": PicturesQuery(),
            "caption": PicturesCaption(),
            "detect": PicturesDetect(),
            "chat": PicturesChat(),
        }

    def cropping(self, config: Any) -> Any:
        return PicturesCropping()

    def prepare(self, model: Any, config: EngineConfig, bounds: Any, *, owns_model: bool) -> PreparedPictures:
        return PreparedPictures(config=config, bounds=bounds, model=model)


def random_pictures(vocab_size: int, *, dim: int = 24, heads: int = 3, max_context: int = 4096) -> SmallPictures:
    """A model with random weights."""
    chance = torch.Generator().manual_seed(3)
    shapes: Mapping[str, tuple[int, ...]] = {
        "embedding": (vocab_size, dim),
        "position": (max_context, dim),
        "qkv": (3 * dim, dim),
        "head": (vocab_size, dim),
        "colour": (3, NUM_IMAGE_TOKENS * dim),
        "place": (1, dim),
        "places": (_NUM_PLACES, dim),
    }
    config = SmallPicturesConfig(vocab_size, dim, heads, max_context)
    return SmallPictures(config, {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()})
