import pytest
import torch

from kestrel_runtime.api.requests import Caption, Detect, Point, Query, Segment
from kestrel_runtime.execution.token_rules import TokenRules
from kestrel_runtime.interfaces.token_grammar import Grammar, GrammarState
from kestrel_runtime.interfaces.tokens import TokenRule
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills import SKILLS
from tests.runtime.models.moondream.skills.parsing import IMAGE, MOONDREAM_2, MOONDREAM_3, TOKENIZER

VOCABULARY = 30
CPU = torch.device("cpu")
REQUESTS = [
    Query("what?"),
    Query("what?", reasoning=True),
    Caption(IMAGE),
    Point("cat", IMAGE),
    Detect("cat", IMAGE),
    Segment("cat", IMAGE),
]


def grammar_of(request: object, config: MoondreamConfig) -> Grammar:
    skill = SKILLS[request.skill]  # pyright: ignore[reportAttributeAccessIssue] - each kind of request has one
    return skill.new_parser(request, TOKENIZER, config).grammar


@pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_the_table_goes_where_the_grammar_of_each_skill_goes(request_: object, config: MoondreamConfig) -> None:
    table, grammar = TokenRules(VOCABULARY, CPU), grammar_of(request_, config)
    table.row(Grammar((GrammarState(TokenRule(), 0),)), 0)  # so that rows and states are not the same numbers
    for state in range(len(grammar.states)):
        row = table.row(grammar, state)
        for is_exhausted in (False, True):
            ids = torch.arange(VOCABULARY)
            after = table.after(torch.full_like(ids, row), ids, torch.full_like(ids, is_exhausted).bool())
            wanted = [grammar.after(state, int(id), is_exhausted=is_exhausted) for id in ids]
            assert after.tolist() == [table.row(grammar, state) for state in wanted]


@pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])
def test_the_table_forbids_what_the_rules_forbid(config: MoondreamConfig) -> None:
    table = TokenRules(VOCABULARY, CPU)
    for request in REQUESTS:
        grammar = grammar_of(request, config)
        for state, rule in enumerate(grammar.rules):
            row = table.row(grammar, state)
            assert table.forbidden[row].tolist() == [not rule.lets_pass(id) for id in range(VOCABULARY)]
            assert table.is_spatial[row].item() == rule.is_spatial


def test_a_grammar_is_written_down_once() -> None:
    table = TokenRules(VOCABULARY, CPU)
    grammar = grammar_of(Query("what?", reasoning=True), MOONDREAM_2)
    first = table.row(grammar, 0)
    assert table.row(grammar_of(Query("why?", reasoning=True), MOONDREAM_2), 0) == first
    assert table.row(grammar, 2) == first + 2
