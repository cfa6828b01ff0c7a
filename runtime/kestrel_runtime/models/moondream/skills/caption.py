"""Implements Caption: a description of an image."""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.events import CaptionOutput
from kestrel_runtime.api.requests import Caption
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_TOKENS, AnswerParser, Skill, text_tokens
from kestrel_runtime.output.output_parser import OutputParser


class CaptionSkill(Skill):
    """Describe an image in one of three lengths."""

    name = "caption"
    text_field = "length"
    defaults = SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=DEFAULT_MAX_TOKENS)

    def prompt(self, request: Caption, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        templates = config.tokenizer.templates["caption"]
        if request.length not in templates:
            raise InvalidRequest((Violation("length", f"this model's captions are {', '.join(templates)}"),))
        return Prompt(text_tokens(templates[request.length]))

    def new_parser(self, request: Caption, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return _CaptionParser(tokenizer, config, request.sampling)


class _CaptionParser(AnswerParser):
    """An answer parser whose text is the caption."""

    def output(self) -> CaptionOutput:
        return CaptionOutput(self.text, self.logprobs)
