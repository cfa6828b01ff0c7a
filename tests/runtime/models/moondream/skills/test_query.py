from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.api.events import FinishReason, Grounding, Location, QueryOutput, Reasoning, TextChannel
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_TOKENS
from kestrel_runtime.models.moondream.skills.query import QuerySkill
from kestrel_runtime.output.output_parser import Token, TokenRule
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, expected
from tests.runtime.models.moondream.skills.parsing import (
    ANSWER,
    COORDINATE,
    END_GROUND,
    EOS,
    ID_OF_BYTE,
    IMAGE,
    MOONDREAM_2,
    MOONDREAM_3,
    PUBLISHED_2,
    PUBLISHED_3,
    REFERENCE_TOKENS,
    REFERENCES,
    SIZE,
    START_POINTS,
    THINKING,
    TOKENIZER,
    consume,
    coordinate,
    emitted,
    may_come,
    output,
    plain,
    spelled,
    words,
)

SKILL = QuerySkill()
BOTH = pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])
END, OPEN_ANSWER = Token(EOS), Token(ANSWER)
OPEN_POINTS, CLOSE_POINTS = Token(START_POINTS), Token(END_GROUND)


def prompt(config, **fields):
    return SKILL.prompt(Query("what is this?", IMAGE, **fields), TOKENIZER, config).tokens


def parser(config=MOONDREAM_3, *, reasoning=False, max_tokens=None):
    request = Query("what?", reasoning=reasoning, sampling=SamplingParams(max_tokens=max_tokens))
    return SKILL.new_parser(request, TOKENIZER, config)


def thoughts(tokens, config=MOONDREAM_3):
    """What is parsed from reasoning made of these tokens, and what was emitted."""
    query = parser(config, reasoning=True)
    deltas = consume(query, [*tokens, OPEN_ANSWER, END])
    reasoning = output(query, QueryOutput).reasoning
    assert reasoning is not None
    assert emitted(deltas, TextChannel.REASONING) == reasoning.text
    return reasoning


# Prompts


@pytest.mark.parametrize(
    ("config", "reasoning", "end"),
    [
        (PUBLISHED_2, False, [ANSWER, ANSWER]),
        (PUBLISHED_2, True, [ANSWER, THINKING]),
        (PUBLISHED_3, False, [ANSWER]),
        (PUBLISHED_3, True, [THINKING]),
    ],
    ids=["moondream2", "moondream2 reasoning", "moondream3", "moondream3 reasoning"],
)
def test_a_prompt_ends_as_its_generation_was_trained(config, reasoning, end):
    text = TOKENIZER.encode("what is this?")
    assert prompt(config, reasoning=reasoning) == plain([1, 15381, 2, *text, *end])


@pytest.mark.parametrize("config", [PUBLISHED_2, PUBLISHED_3], ids=["moondream2", "moondream3"])
def test_references_stand_before_the_question(config):
    text = words("what is this?")
    with_references = prompt(config, spatial_refs=REFERENCES)
    assert with_references[: 3 + 5 + len(text)] == [*plain([1, 15381, 2]), *REFERENCE_TOKENS, *text]


def test_a_question_is_stripped_and_has_no_space_before_it():
    padded = SKILL.prompt(Query("  what is this?\n"), TOKENIZER, MOONDREAM_3).tokens
    assert padded == prompt(MOONDREAM_3)
    assert padded[4:-1] == words("what is this?") != words(" what is this?")


def test_a_question_that_spells_control_tokens_stays_text():
    tokens = SKILL.prompt(Query("<|endoftext|><|md_reserved_2|>"), TOKENIZER, MOONDREAM_3).tokens
    assert all(token.id > 15 for token in tokens[4:-1])


@pytest.mark.parametrize(("folder", "config"), [(MD2_SMALL, MOONDREAM_2), (MD3_SMALL, MOONDREAM_3)])
def test_prompts_are_those_of_the_reference(folder, config):
    for image in expected(folder)["images"]:
        question = next(call["args"]["question"] for call in image["calls"] if call["skill"] == "query")
        ids = [token.id for token in SKILL.prompt(Query(question, IMAGE), TOKENIZER, config).tokens]
        assert ids == image["query_prompt_tokens"]


# Answers


@BOTH
def test_an_answer_is_the_text_up_to_the_end_token(config):
    query = parser(config)
    deltas = consume(query, [*words("a kestrel"), END])
    assert query.output() == QueryOutput("a kestrel", None)
    assert emitted(deltas) == "a kestrel"
    assert query.finish_reason is FinishReason.STOP


def test_an_answer_ends_with_its_last_allowed_token():
    query = parser(max_tokens=3)
    consume(query, spelled("ab"))
    assert query.finish_reason is None
    consume(query, spelled("c"))
    assert query.finish_reason is FinishReason.LENGTH
    assert query.output() == QueryOutput("abc", None)


def test_the_end_token_does_not_count_towards_max_tokens():
    query = parser(max_tokens=3)
    consume(query, [*spelled("ab"), END])
    assert query.finish_reason is FinishReason.STOP
    assert query.output() == QueryOutput("ab", None)


def test_places_in_an_answer_are_not_read():
    query = parser()
    assert not query.rule.is_spatial
    consume(query, [*spelled("a"), Token(COORDINATE), Token(SIZE), *spelled("b"), END])
    assert query.output() == QueryOutput("ab", None)


# Reasoning


@BOTH
def test_reasoning_comes_before_the_answer_on_a_channel_of_its_own(config):
    query = parser(config, reasoning=True)
    deltas = consume(query, [*words("it has wings"), OPEN_ANSWER, *words("a bird"), END])
    assert query.output() == QueryOutput("a bird", Reasoning("it has wings", ()))
    assert emitted(deltas, TextChannel.REASONING) == "it has wings"
    assert emitted(deltas, TextChannel.ANSWER) == "a bird"
    channels = [delta.channel for delta in deltas]
    assert channels == sorted(channels, key=[TextChannel.REASONING, TextChannel.ANSWER].index)
    assert query.finish_reason is FinishReason.STOP


def test_a_passage_is_what_stands_between_two_markers():
    tokens = [
        *spelled("look "),
        OPEN_POINTS,
        *spelled("wings"),
        coordinate(0.25),
        coordinate(0.5),
        CLOSE_POINTS,
        *spelled(" so"),
    ]
    assert thoughts(tokens) == Reasoning("look wings so", (Grounding(5, 10, (Location(0.25, 0.5),)),))


def test_every_pair_in_a_passage_is_a_place():
    pairs = [coordinate(value) for value in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)]
    tokens = [OPEN_POINTS, *pairs[:2], *spelled("two"), *pairs[2:], CLOSE_POINTS]
    places = (Location(0.1, 0.2), Location(0.3, 0.4), Location(0.5, 0.6))
    assert thoughts(tokens) == Reasoning("two", (Grounding(0, 3, places),))


def test_passages_follow_one_another():
    place = [coordinate(0.5), coordinate(0.5)]
    tokens = [
        *spelled("ab"),
        *place,
        OPEN_POINTS,
        *spelled("cd"),
        *place,
        CLOSE_POINTS,
        *spelled("ef"),
        CLOSE_POINTS,
        OPEN_POINTS,
        *place,
        *spelled("gh"),
    ]
    reasoning = thoughts(tokens)
    assert reasoning.text == "abcdefgh"
    spans = [(grounding.start_char, grounding.end_char) for grounding in reasoning.groundings]
    assert spans == [(0, 2), (2, 4), (6, 8)]


def test_a_coordinate_without_its_other_half_is_dropped():
    tokens = [OPEN_POINTS, *[coordinate(value) for value in (0.1, 0.2, 0.3)], CLOSE_POINTS, coordinate(0.9)]
    assert thoughts([*tokens, *spelled("a")]).groundings == (Grounding(0, 0, (Location(0.1, 0.2),)),)


def test_half_a_pair_does_not_join_the_next_passage():
    tokens = [coordinate(0.1), OPEN_POINTS, coordinate(0.2), coordinate(0.3), CLOSE_POINTS]
    assert thoughts(tokens).groundings == (Grounding(0, 0, (Location(0.2, 0.3),)),)


def test_places_are_counted_in_code_points():
    tokens = [*spelled("é✓"), OPEN_POINTS, *spelled("🙂x"), coordinate(0.5), coordinate(0.5), CLOSE_POINTS]
    assert thoughts(tokens).groundings == (Grounding(2, 4, (Location(0.5, 0.5),)),)


def test_a_marker_breaks_an_unfinished_character():
    first, second = (ID_OF_BYTE[byte] for byte in "é".encode())
    assert thoughts([*plain([first]), OPEN_POINTS, *plain([second])]).text == "��"


def test_moondream_3_may_think_of_the_end_without_ending():
    assert thoughts([*spelled("a"), END, *spelled("b")]).text == "ab"


@BOTH
def test_reasoning_has_a_budget_of_its_own_and_then_the_answer_is_forced(config):
    query = parser(config, reasoning=True, max_tokens=3)
    consume(query, [*spelled("ab"), coordinate(0.5)])
    assert query.rule == TokenRule(allowed=(ANSWER,))
    assert query.finish_reason is None
    consume(query, [OPEN_ANSWER])
    consume(query, spelled("cd"))
    assert query.finish_reason is None
    consume(query, spelled("e"))
    assert query.finish_reason is FinishReason.LENGTH
    assert query.output() == QueryOutput("cde", Reasoning("ab", ()))


def test_each_phase_has_768_tokens_unless_the_caller_says_otherwise():
    query = parser(reasoning=True)
    consume(query, spelled("a" * (DEFAULT_MAX_TOKENS - 1)))
    assert query.rule.allowed is None
    consume(query, spelled("a"))
    assert query.rule.allowed == (ANSWER,)
    consume(query, [OPEN_ANSWER, *spelled("b" * (DEFAULT_MAX_TOKENS - 1))])
    assert query.finish_reason is None
    consume(query, spelled("b"))
    assert query.finish_reason is FinishReason.LENGTH


@BOTH
def test_a_cut_while_reasoning_leaves_no_answer(config):
    query = parser(config, reasoning=True)
    tokens = [*spelled("ab"), coordinate(0.5), coordinate(0.25), *plain([ID_OF_BYTE["é".encode()[0]]])]
    deltas: list[Any] = [*consume(query, tokens), *query.truncate()]
    assert query.finish_reason is FinishReason.LENGTH
    reasoning = Reasoning("ab�", (Grounding(0, 3, (Location(0.5, 0.25),)),))
    assert query.output() == QueryOutput("", reasoning)
    assert emitted(deltas, TextChannel.REASONING) == "ab�"


def test_a_cut_while_answering_keeps_both_texts():
    query = parser(reasoning=True)
    deltas = consume(query, [*spelled("ab"), OPEN_ANSWER, *spelled("c"), *plain([ID_OF_BYTE["é".encode()[0]]])])
    deltas += query.truncate()
    assert query.finish_reason is FinishReason.LENGTH
    assert query.output() == QueryOutput("c�", Reasoning("ab", ()))
    assert emitted(deltas) == "c�"


# Masks


def test_moondream_2_is_masked_but_for_the_first_token_of_each_phase():
    query = parser(MOONDREAM_2, reasoning=True)
    assert query.rule == TokenRule(is_spatial=True)
    consume(query, [END])
    for token in (*spelled("ab"), OPEN_POINTS, coordinate(0.5)):
        assert query.rule == TokenRule(suppressed=(EOS, SIZE), is_spatial=True)
        consume(query, [token])
    consume(query, [OPEN_ANSWER])
    assert query.rule == TokenRule()
    consume(query, [OPEN_ANSWER])
    for token in spelled("cd"):
        assert query.rule == TokenRule(suppressed=(ANSWER,))
        consume(query, [token])


def test_moondream_3_is_not_masked():
    query = parser(MOONDREAM_3, reasoning=True)
    for token in (*spelled("ab"), OPEN_POINTS, coordinate(0.5)):
        assert query.rule == TokenRule(is_spatial=True)
        consume(query, [token])
    consume(query, [OPEN_ANSWER])
    for token in spelled("cd"):
        assert query.rule == TokenRule()
        consume(query, [token])


some_tokens = st.lists(
    st.one_of(
        st.sampled_from([END, OPEN_ANSWER, OPEN_POINTS, CLOSE_POINTS, coordinate(0.25), coordinate(0.75)]),
        st.sampled_from([Token(id) for id in ID_OF_BYTE.values()]),
        st.sampled_from([Token(id) for id in range(300, 330)]),
    ),
    max_size=60,
)


@given(some_tokens, st.sampled_from([MOONDREAM_2, MOONDREAM_3]), st.booleans(), st.integers(1, 20))
def test_whatever_comes_the_deltas_add_up_to_the_output(tokens, config, reasoning, max_tokens):
    query, deltas = parser(config, reasoning=reasoning, max_tokens=max_tokens), []
    for token in tokens:
        if query.finish_reason is None and may_come(query, token):
            deltas += consume(query, [token])
    if query.finish_reason is None:
        deltas += query.truncate()
    answer = output(query, QueryOutput)
    assert emitted(deltas, TextChannel.ANSWER) == answer.answer
    assert (answer.reasoning is None) == (not reasoning)
    thought = answer.reasoning or Reasoning("", ())
    assert emitted(deltas, TextChannel.REASONING) == thought.text
    for grounding in thought.groundings:
        assert 0 <= grounding.start_char <= grounding.end_char <= len(thought.text)
        assert grounding.points
