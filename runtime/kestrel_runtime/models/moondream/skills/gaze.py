"""Implements Gaze: the place that somebody in the image looks at.

The prompt asks for the point of an object "gaze", with the eye as spatial reference. Source: the baseline engine's
README. The public reference uses another prompt, in an older format.
"""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import FinishReason, FoundObject
from kestrel_runtime.api.requests import Gaze
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import Skill, framed_prompt
from kestrel_runtime.models.moondream.skills.point import PointParser
from kestrel_runtime.output.output_parser import OutputParser, Token


class GazeSkill(Skill):
    """Find the place that somebody looks at. The answer has one point or none."""

    name = "gaze"
    template = "point"
    text_field = "eye"
    defaults = SkillDefaults(temperature=0.0, top_p=1.0)

    def prompt(self, request: Gaze, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        text = tokenizer.encode(" gaze")
        return framed_prompt(config.tokenizer.templates["point"], request.spatial_refs, text, config)

    def new_parser(self, request: Gaze, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return _GazeParser(config, max_objects=1, max_tokens=request.sampling.max_tokens)


class _GazeParser(PointParser):
    """Parses one point; the answer is complete after it."""

    def parse(self, token: Token) -> list[FoundObject]:
        found = super().parse(token)
        if self.finish_reason is FinishReason.MAX_OBJECTS:
            self.finish_reason = FinishReason.STOP
        return found
