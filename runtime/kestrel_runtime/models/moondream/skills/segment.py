"""Implements Segment: the outline of one object, as a box and an SVG path over it.

The model generates two coordinates and a size, then text tokens that spell path commands and integers. The integers
range from 0 to 960 over the box. Source: the baseline engine's description of the format (`skills/segment.py`,
`utils/svg.py`). Here arguments are grouped by command, so that H, V and A have the right number of them.

Outlines are not refined. The baseline engine refines them with a second network, which reads the features of the
vision encoder. The weights of that network are gated, so an implementation could not be tested. It would run after
the last token, on the path and the box that `_SegmentParser.output` returns.
"""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import (
    Box,
    FinishReason,
    OutlineBox,
    SegmentMask,
    SegmentOutput,
    TextChannel,
    TextDelta,
)
from kestrel_runtime.api.requests import Segment
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_TOKENS, Skill, framed_prompt
from kestrel_runtime.models.moondream.skills.detect import box_around
from kestrel_runtime.models.moondream.skills.svg import PathWriter
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule


class SegmentSkill(Skill):
    """Outline an object."""

    name = "segment"
    text_field = "object"
    defaults = SkillDefaults(temperature=0.0, top_p=1.0, max_tokens=DEFAULT_MAX_TOKENS)

    def prompt(self, request: Segment, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        text = tokenizer.encode(request.object.strip())
        return framed_prompt(config.tokenizer.templates["segment"], request.spatial_refs, text, config)

    def new_parser(self, request: Segment, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        max_tokens = request.sampling.max_tokens or DEFAULT_MAX_TOKENS
        return _SegmentParser(tokenizer, config, max_tokens, request.mask_format)


class _SegmentParser(OutputParser):
    """Uses the first two coordinates, the first size and every text token.

    Emits the box as soon as it is known, then the path in pieces of whole commands.
    """

    grammar = Grammar((GrammarState(TokenRule(is_spatial=True), 0),))

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, max_tokens: int, mask_format: str) -> None:
        self._tokenizer = tokenizer
        self._mask_format = mask_format
        self._eos_id = config.tokenizer.eos_id
        self.max_tokens = max_tokens
        self._num_tokens = 0
        self._coordinates: list[float] = []
        self._size: tuple[float, ...] = ()
        self._box: Box | None = None
        self._path = PathWriter()
        self._num_path_tokens = 0
        # How much of the path's text and tokens has been emitted.
        self._num_emitted_chars = 0
        self._num_emitted_tokens = 0

    def parse(self, token: Token) -> list[TextDelta | OutlineBox]:
        if token.id == self._eos_id:
            self.finish_reason = FinishReason.STOP
            return []
        self._num_tokens += 1
        if self._num_tokens == self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if len(token.value) == 1:
            self._coordinates.append(token.value[0])
        elif token.value:
            self._size = self._size or token.value
        elif word := self._tokenizer.decode([token.id]).strip():  # control ids decode to nothing
            self._num_path_tokens += 1
            self._path.push(word)
        return [*self._new_box(), *self._new_text()]

    def output(self) -> SegmentOutput:
        if self._box is None:
            return SegmentOutput((), self._mask_format)
        is_partial = self._path.is_partial or self.finish_reason is FinishReason.LENGTH
        return SegmentOutput((SegmentMask(self._path.path, self._box, is_partial),), self._mask_format)

    def _new_box(self) -> list[OutlineBox]:
        if self._box is not None or len(self._coordinates) < 2 or not self._size:
            return []
        self._box = box_around(*self._coordinates[:2], *self._size)
        return [OutlineBox(self._box)]

    def _new_text(self) -> list[TextDelta]:
        if self._box is None or len(self._path.path) == self._num_emitted_chars:
            return []
        text, start = self._path.path[self._num_emitted_chars :], self._num_emitted_tokens
        self._num_emitted_chars, self._num_emitted_tokens = len(self._path.path), self._num_path_tokens
        return [TextDelta(text, TextChannel.PATH, start, self._num_path_tokens - start)]
