"""Sequences made by hand: no image is decoded and no text is read."""

import itertools

import numpy as np

from kestrel_runtime.api.events import CaptionOutput, FinishReason, TextDelta
from kestrel_runtime.api.requests import Priority
from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.imaging.crops import Crops, DecodedImage
from kestrel_runtime.output.embedding import EmbeddingForm, EmbeddingParser
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule
from kestrel_runtime.scheduling.sequence import SequenceClock, SequenceImage, SequenceRequest, TokenSequence

_ids = itertools.count(1)


class RuleParser(OutputParser):
    """Never finishes; its rule is what the test says."""

    def __init__(self, rule: TokenRule) -> None:
        self.grammar = Grammar((GrammarState(rule, 0),))

    def parse(self, token: Token) -> list[TextDelta]:
        return []

    def output(self) -> CaptionOutput:
        return CaptionOutput("")


class ShortParser(OutputParser):
    """Ends after `num_tokens`, or raises as a bug would."""

    def __init__(self, num_tokens: int, *, is_broken: bool = False) -> None:
        self.grammar = Grammar((GrammarState(TokenRule(), 0),))
        self._num_left = num_tokens
        self._is_broken = is_broken

    def parse(self, token: Token) -> list[TextDelta]:
        if self._is_broken:
            raise ZeroDivisionError
        self._num_left -= 1
        if not self._num_left:
            self.finish_reason = FinishReason.STOP
        return []

    def output(self) -> CaptionOutput:
        return CaptionOutput("")


def blank_crops(num_crops: int) -> Crops:
    """The crops of an image, of one pixel each."""
    return Crops(np.zeros((num_crops, 1, 1, 3), dtype=np.uint8), 1, num_crops - 1)


def new_sequence(
    prompt: list[Token] | int = 1,
    *,
    num_image_tokens: int = 0,
    image_places: tuple[int, ...] = (1,),
    pixels: Crops | DecodedImage | None = None,
    rule: TokenRule = TokenRule(),  # noqa: B008 - a rule is immutable
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    controls: SamplingParams | None = None,
    max_context: int = 10_000,
    priority: Priority = Priority.NORMAL,
    max_priority: Priority = Priority.NORMAL,
    tenant: str = "",
    submitted: float = 0.0,
    embeddings: EmbeddingForm | None = None,
) -> TokenSequence:
    """A waiting sequence; a number as prompt stands for that many tokens. `image_places`: the tokens before each
    image, if images have tokens."""
    tokens = [Token(place % 100) for place in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return TokenSequence(
        id=next(_ids),
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        request=SequenceRequest(
            parser=RuleParser(rule) if embeddings is None else EmbeddingParser(embeddings),
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            controls=controls,
            max_context=max_context,
            priority=priority,
            standing=max(priority, max_priority),
            tenant=tenant,
            embeddings=embeddings,
        ),
        clock=SequenceClock(submitted=submitted),
        images=[
            SequenceImage(place + number * num_image_tokens, num_image_tokens, pixels)
            for number, place in enumerate(image_places if num_image_tokens else ())
        ],
    )
