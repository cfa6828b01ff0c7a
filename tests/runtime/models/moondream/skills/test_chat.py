"""The prompts of conversations. Their parser is that of queries."""

import pytest
import tokenizers

from kestrel_runtime.api.requests import Chat, ChatMessage, Query, Role
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.chat import ChatSkill
from kestrel_runtime.models.moondream.skills.query import QuerySkill
from tests.reference_fixtures import MD2_SMALL
from tests.runtime.models.moondream.skills.parsing import (
    IMAGE,
    MOONDREAM_2,
    MOONDREAM_3,
    PUBLISHED_2,
    PUBLISHED_3,
    TOKENIZER,
)

ALL = pytest.mark.parametrize(
    "config", [MOONDREAM_2, MOONDREAM_3, PUBLISHED_2, PUBLISHED_3], ids=["md2", "md3", "published2", "published3"]
)


def ids_of(config: MoondreamConfig, *messages: tuple[Role, str], reasoning: bool = False) -> list[int]:
    request = Chat(tuple(ChatMessage(*message) for message in messages), reasoning)
    return [token.id for token in ChatSkill().prompt(request, TOKENIZER, config).tokens]


def text(words: str) -> list[int]:
    return TOKENIZER.encode(words)


@ALL
@pytest.mark.parametrize("reasoning", [False, True])
def test_one_question_has_the_prompt_of_a_query(config: MoondreamConfig, reasoning: bool):
    query = QuerySkill().prompt(Query(" what is this? ", IMAGE, reasoning), TOKENIZER, config).tokens
    asked = ids_of(config, (Role.USER, " what is this? "), reasoning=reasoning)
    assert asked == [token.id for token in query]


@pytest.mark.parametrize(
    ("config", "direct", "reasoned"),
    [(PUBLISHED_2, [3, 3], [3, 4]), (PUBLISHED_3, [3], [4])],
    ids=["moondream2", "moondream3"],
)
def test_turns_have_the_layout_of_the_makers(config: MoondreamConfig, direct: list[int], reasoned: list[int]):
    turns = (
        (Role.SYSTEM, "Be brief."),
        (Role.SYSTEM, "Be kind."),
        (Role.USER, "What is it?"),
        (Role.ASSISTANT, " A bird."),
        (Role.USER, "Which?"),
    )
    question = [1, 15381, 2]
    first = [*question, *text("Be brief.\n\nBe kind.\n\nWhat is it?"), *direct, *text(" A bird.")]
    assert ids_of(config, *turns) == [*first, *question, *text("Which?"), *direct]
    assert ids_of(config, *turns, reasoning=True) == [*first, *question, *text("Which?"), *reasoned]


def test_images_precede_the_question_of_their_message_and_answers_end_before_the_next_one():
    messages = (
        ChatMessage(Role.SYSTEM, "Be brief."),
        ChatMessage(Role.USER, "What is it?", (IMAGE, IMAGE)),
        ChatMessage(Role.ASSISTANT, " A bird."),
        ChatMessage(Role.USER, "And here?", (IMAGE,)),
    )
    prompt = ChatSkill().prompt(Chat(messages), TOKENIZER, PUBLISHED_3)
    end = len([1, 15381, 2, *text("Be brief.\n\nWhat is it?"), 3, *text(" A bird.")])
    assert (prompt.image_places, prompt.answer_ends) == ((0, 0, end), (end,))


def test_turns_need_not_alternate():
    question = [1, 15381, 2]
    asked = ids_of(PUBLISHED_3, (Role.ASSISTANT, "hi"), (Role.USER, "a"), (Role.USER, "b"))
    assert asked == [3, *text("hi"), *question, *text("a"), *question, *text("b"), 3]


def test_no_text_of_a_conversation_becomes_a_control_token():
    library = tokenizers.Tokenizer.from_file(str(MD2_SMALL / "tokenizer.json"))
    control = [(id, token.content) for id, token in library.get_added_tokens_decoder().items() if token.special]
    for id, spelling in control:
        assert library.encode(spelling, add_special_tokens=False).ids == [id]  # as others would read it
        for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT):
            said = ids_of(PUBLISHED_3, (role, spelling), (Role.USER, "x"))
            plain = ids_of(PUBLISHED_3, (role, "plain"), (Role.USER, "x"))
            assert said.count(id) == plain.count(id)
    assert control


@ALL
@pytest.mark.parametrize(
    "turns",
    [
        ((Role.USER, "What is it?"),),
        (
            (Role.SYSTEM, " Be brief. "),
            (Role.SYSTEM, "Be kind."),
            (Role.ASSISTANT, "Hello."),
            (Role.USER, " What is it? "),
            (Role.ASSISTANT, " A bird."),
            (Role.USER, "Which one?"),
        ),
        ((Role.SYSTEM, " " * 5000), (Role.USER, ""), (Role.USER, "a")),
    ],
)
def test_the_tokens_of_messages_are_those_of_the_prompt(
    config: MoondreamConfig, turns: tuple[tuple[Role, str], ...]
):
    for reasoning in (False, True):
        request = Chat(tuple(ChatMessage(*turn) for turn in turns), reasoning)
        counts = ChatSkill().message_tokens(request, TOKENIZER, config)
        assert len(counts) == len(turns)
        assert all(count >= 0 for count in counts)
        assert sum(counts) == 1 + len(ids_of(config, *turns, reasoning=reasoning))
