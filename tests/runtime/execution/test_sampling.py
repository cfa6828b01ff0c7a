import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.execution.request_state import RequestState, SampleNeeds
from kestrel_runtime.execution.sampling import TokenRules, TokenSampler
from kestrel_runtime.output.output_parser import Grammar, GrammarState, TokenRule
from tests.runtime.sequences import new_sequence

KERNELS = Kernels.select("cpu", {})

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
            integers = torch.zeros(VOCABULARY, 6, dtype=torch.int64)
            integers[:, 2], integers[:, 4] = row, 1 if is_exhausted else 2
            KERNELS.advance_rows(integers, torch.zeros(VOCABULARY, 1), table.successors, ids, ids)
            after = integers[:, 2]
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


def test_what_is_written_moves_a_row_on() -> None:
    rules = TokenRules(VOCABULARY, CPU)
    state = RequestState(
        CPU, rules.row, lambda _: 0, num_rows=2, max_pages=1, values_per_token=2, vocab_size=VOCABULARY
    )
    sequence, other = new_sequence(seed=5), new_sequence(seed=6)
    sequence.request.parser.grammar, sequence.request.parser.budget = GRAMMARS["a budget"], 1
    for one in (sequence, other):
        one.cache.pages = [0]
    state.open([sequence, other])
    before = state.read(torch.tensor([state.row(other)]))
    rows = torch.tensor([state.row(sequence)])
    sampler = TokenSampler(state, rules, rows, SampleNeeds(False, 0), KERNELS)
    sampled = sampler.write(torch.tensor([7]), torch.tensor([1]), torch.tensor([[0.5, 0.0]]))
    assert sampled.tolist() == [[7, 1, 0.5, 0.0, -1.0]]
    exhausted = rules.row(sequence.request.parser.grammar, 1)
    assert [column.item() for column in state.read(rows)] == [7, 1, exhausted, 1, 1, 5]
    assert state.values(rows).tolist() == [[0.5, 0.0]]
    after = state.read(torch.tensor([state.row(other)]))
    assert [column.item() for column in after] == [column.item() for column in before]


def test_padding_finds_rules_before_any_grammar_is_known() -> None:
    rules = TokenRules(VOCABULARY, CPU)
    state = RequestState(
        CPU, rules.row, lambda _: 0, num_rows=2, max_pages=1, values_per_token=2, vocab_size=VOCABULARY
    )
    rows = torch.tensor([state.padding_row] * 3)
    for token in (0, 7, 3):
        sampler = TokenSampler(state, rules, rows, SampleNeeds(False, 0), KERNELS)
        sampler.write(torch.tensor([token] * 3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2))
        assert 0 <= int(state.read(rows).rules[0]) < len(rules.forbidden)
