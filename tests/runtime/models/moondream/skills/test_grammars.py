"""The grammars of all skills as rows of the table on the device."""

import pytest

from kestrel_runtime.api.requests import (
    Caption,
    Chat,
    ChatMessage,
    Detect,
    Gaze,
    Point,
    PointRef,
    Query,
    Request,
    Role,
    SamplingParams,
    Segment,
)
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills import SKILLS
from kestrel_runtime.output.output_parser import Grammar, Token
from tests.runtime.execution.test_sampling import assert_same_rules, assert_same_successors
from tests.runtime.models.moondream.skills.parsing import ID_OF_BYTE, IMAGE, MOONDREAM_2, MOONDREAM_3, TOKENIZER

CONFIGS = pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])
REQUESTS = [
    Query("what?"),
    Query("what?", reasoning=True),
    Caption(IMAGE),
    Point("cat", IMAGE),
    Detect("cat", IMAGE),
    Segment("cat", IMAGE),
    Chat((ChatMessage(Role.USER, "what?"),), reasoning=True),
]


def grammar_of(request: Request, config: MoondreamConfig) -> Grammar:
    return SKILLS[request.skill].new_parser(request, TOKENIZER, config).grammar


@CONFIGS
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_the_table_goes_where_the_grammar_of_each_skill_goes(request_: Request, config: MoondreamConfig):
    assert_same_successors(grammar_of(request_, config))


@CONFIGS
def test_the_table_forbids_what_the_rules_of_the_skills_forbid(config: MoondreamConfig):
    assert_same_rules(*(grammar_of(request, config) for request in REQUESTS))


def test_two_parsers_of_one_skill_have_one_grammar():
    first, second = (grammar_of(Query(text, reasoning=True), MOONDREAM_2) for text in ("what?", "why?"))
    assert first == second


@CONFIGS
@pytest.mark.parametrize(
    "request_",
    [
        Query("what?", sampling=SamplingParams(max_tokens=5)),
        Query("what?", reasoning=True, sampling=SamplingParams(max_tokens=5)),
        Caption(IMAGE, sampling=SamplingParams(max_tokens=5)),
        Point("cat", IMAGE, max_objects=3),
        Point("cat", IMAGE, sampling=SamplingParams(max_tokens=3)),
        Detect("cat", IMAGE, max_objects=2),
        Segment("cat", IMAGE, sampling=SamplingParams(max_tokens=7)),
        Gaze(IMAGE, PointRef(0.25, 0.75)),
    ],
    ids=lambda request: type(request).__name__,
)
def test_an_answer_that_does_not_end_by_itself_has_as_many_tokens_as_its_parser_says(
    request_: Request, config: MoondreamConfig
):
    parser = SKILLS[request_.skill].new_parser(request_, TOKENIZER, config)
    values = {config.tokenizer.coord_id: (0.5,), config.tokenizer.size_id: (0.5, 0.5)}
    while parser.finish_reason is None:
        allowed = parser.rule.allowed
        token_id = ID_OF_BYTE[ord("a")] if allowed is None else allowed[0]
        parser.consume(Token(token_id, values.get(token_id, ())))
    assert parser.num_consumed == parser.max_tokens
