import pytest
import torch

from kestrel_runtime.execution.token_rules import TokenRules
from kestrel_runtime.interfaces.token_grammar import Grammar, GrammarState
from kestrel_runtime.interfaces.tokens import TokenRule

VOCABULARY = 30
CPU = torch.device("cpu")
FREE = TokenRule()
GRAMMARS = {
    "one state": Grammar((GrammarState(TokenRule(is_spatial=True), 0),)),
    "a cycle": Grammar(
        (
            GrammarState(TokenRule(allowed=(5, 0), is_spatial=True), 1),
            GrammarState(TokenRule(allowed=(5,), is_spatial=True), 0),
        )
    ),
    "a budget": Grammar(
        (
            GrammarState(TokenRule(suppressed=(0, 6)), 0, on=(3, 2), exhausted=1),
            GrammarState(TokenRule(allowed=(3,)), 2),
            GrammarState(FREE, 2),
        )
    ),
}


def assert_same_successors(grammar: Grammar) -> None:
    """The table goes from state to state as the grammar does, whichever token comes."""
    table = TokenRules(VOCABULARY, CPU)
    table.row(Grammar((GrammarState(FREE, 0),)), 0)  # so that rows and states are not the same numbers
    for state in range(len(grammar.states)):
        row = table.row(grammar, state)
        for is_exhausted in (False, True):
            ids = torch.arange(VOCABULARY)
            after = table.after(torch.full_like(ids, row), ids, torch.full_like(ids, is_exhausted).bool())
            wanted = [grammar.after(state, int(id), is_exhausted=is_exhausted) for id in ids]
            assert after.tolist() == [table.row(grammar, state) for state in wanted]


def assert_same_rules(*grammars: Grammar) -> None:
    """The table forbids what the rules of all these grammars forbid."""
    table = TokenRules(VOCABULARY, CPU)
    for grammar in grammars:
        for state, rule in enumerate(grammar.rules):
            row = table.row(grammar, state)
            assert table.forbidden[row].tolist() == [not rule.lets_pass(id) for id in range(VOCABULARY)]
            assert table.is_spatial[row].item() == rule.is_spatial


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_table_goes_where_the_grammar_goes(name: str) -> None:
    assert_same_successors(GRAMMARS[name])


def test_the_table_forbids_what_the_rules_forbid() -> None:
    assert_same_rules(*GRAMMARS.values())


def test_a_grammar_is_written_down_once() -> None:
    table = TokenRules(VOCABULARY, CPU)
    grammar = GRAMMARS["a budget"]
    first = table.row(grammar, 0)
    assert table.row(Grammar(tuple(grammar.states)), 0) == first
    assert table.row(grammar, 2) == first + 2
