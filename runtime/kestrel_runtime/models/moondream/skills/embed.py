"""Implements Embed: what the vision encoder computes for each patch of an image, as wide as the text model.

There is no prompt: the text model does not run.
"""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.requests import Embed
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import Skill
from kestrel_runtime.output.embedding import EmbeddingForm, EmbeddingParser
from kestrel_runtime.output.output_parser import OutputParser


class EmbedSkill(Skill):
    """Embed an image."""

    name = "embed"
    template = None
    text_field = "image"
    defaults = SkillDefaults(temperature=0.0, top_p=1.0)

    def prompt(self, request: Embed, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        return Prompt(())

    def new_parser(self, request: Embed, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return EmbeddingParser(EmbeddingForm(request.patches, request.normalize, request.dtype))
