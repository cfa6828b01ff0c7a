"""Implements Chat: a conversation, whose last message the model answers as it answers a query.

The layout is that of the makers' engine: each message of the user is its images and a question of a query, and each
earlier answer follows the opener of an answer. No end token divides turns. Moondream was trained for single
questions, so for one question the prompt is that of a query.
"""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.requests import Chat, Role
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_TOKENS, Skill, text_tokens
from kestrel_runtime.models.moondream.skills.query import new_answer_parser, opener
from kestrel_runtime.output.output_parser import OutputParser


class ChatSkill(Skill):
    """Answer the last message of a conversation."""

    name = "chat"
    template = "query"
    text_field = "messages"
    defaults = SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=DEFAULT_MAX_TOKENS)

    def prompt(self, request: Chat, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        question_opener, answer_opener = config.tokenizer.templates["query"]["prefix"], opener(config)
        ids: list[int] = []
        instructions: list[str] = []
        image_places: list[int] = []
        answer_ends: list[int] = []
        for message in request.messages:
            if message.role is Role.SYSTEM:
                instructions.append(message.text)
            elif message.role is Role.USER:
                image_places += [len(ids)] * len(message.images)
                # Instructions belong to the first question.
                text = "\n\n".join((*instructions, message.text)).strip()
                instructions.clear()
                ids += (*question_opener, *tokenizer.encode(text))
            else:
                ids += (*answer_opener, *tokenizer.encode(message.text))
                answer_ends.append(len(ids))
        tokens = text_tokens([*ids, *opener(config, reasoning=request.reasoning)])
        return Prompt(tokens, tuple(image_places), tuple(answer_ends))

    def message_tokens(self, request: Chat, tokenizer: Tokenizer, config: MoondreamConfig) -> list[int]:
        question_opener, answer_opener = config.tokenizer.templates["query"]["prefix"], opener(config)
        counts: list[int] = []
        instructions: list[str] = []
        num_instructed = 0
        for message in request.messages:
            if message.role is Role.SYSTEM:
                instructions.append(message.text)
                counts.append(len(tokenizer.encode(message.text.strip())))
                num_instructed += counts[-1]
            elif message.role is Role.USER:
                text = "\n\n".join((*instructions, message.text)).strip()
                counts.append(len(question_opener) + len(tokenizer.encode(text)) - num_instructed)
                instructions.clear()
                num_instructed = 0
            else:
                counts.append(len(answer_opener) + len(tokenizer.encode(message.text)))
        counts[0] += 1  # the token that begins the prompt
        counts[-1] += len(opener(config, reasoning=request.reasoning))
        return counts

    def new_parser(self, request: Chat, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return new_answer_parser(request, tokenizer, config)
