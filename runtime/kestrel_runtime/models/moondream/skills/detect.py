"""Implements Detect: a box around each object of a kind."""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import Box, DetectOutput
from kestrel_runtime.api.requests import Detect
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_OBJECTS, Skill
from kestrel_runtime.models.moondream.skills.point import ObjectParser, object_prompt
from kestrel_runtime.output.output_parser import OutputParser


class DetectSkill(Skill):
    """Find the extents of objects."""

    name = "detect"
    text_field = "object"
    defaults = SkillDefaults(temperature=0.0, top_p=1.0, max_objects=DEFAULT_MAX_OBJECTS)

    def prompt(self, request: Detect, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        return object_prompt(self.name, request, tokenizer, config)

    def new_parser(self, request: Detect, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return _DetectParser(request, config)


class _DetectParser(ObjectParser):
    """Centre x, centre y and size per object."""

    def __init__(self, request: Detect, config: MoondreamConfig) -> None:
        ids = config.tokenizer
        value_ids = (ids.coord_id, ids.coord_id, ids.size_id)
        super().__init__(config, value_ids, request.max_objects, request.sampling.max_tokens, request.min_score)
        self._boxes: list[Box] = []

    def add(self, values: list[tuple[float, ...]]) -> Box:
        (x,), (y,), (width, height) = values
        self._boxes.append(box_around(x, y, width, height))
        return self._boxes[-1]

    def output(self) -> DetectOutput:
        return DetectOutput(tuple(self._boxes), tuple(self.scores))


def box_around(x: float, y: float, width: float, height: float) -> Box:
    """Returns the box of a centre and a size, clipped to the image."""

    def clip(value: float) -> float:
        return min(max(value, 0.0), 1.0)

    return Box(clip(x - width / 2), clip(y - height / 2), clip(x + width / 2), clip(y + height / 2))
