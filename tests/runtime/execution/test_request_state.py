from typing import Any, cast

import torch

from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.execution.request_state import RequestState, SampleNeeds
from kestrel_runtime.output.output_parser import Token, TokenRule
from tests.runtime.sequences import new_sequence

CPU = torch.device("cpu")
ONLY_3, SPATIAL = TokenRule(allowed=(3,)), TokenRule(allowed=(6,), is_spatial=True)


class Lease:
    name = tenant = ""
    is_reclaimed = False
    slot, digest = 3, b""

    def end(self) -> None: ...


def kinds_of(grammar):
    return 2 if grammar.rules[0].is_spatial else 0


def row_of(grammar, state):
    return state


def new_state(num_rows=4, max_pages=6):
    return RequestState(
        CPU, row_of, kinds_of, num_rows=num_rows, max_pages=max_pages, values_per_token=2, vocab_size=100
    )


def holder(pages, *tokens, rule=ONLY_3, **settings):
    sequence = new_sequence([Token(0), *tokens], rule=rule, **settings)
    sequence.cache.pages = pages
    return sequence


def rows_of(state, *sequences):
    return torch.tensor([state.row(sequence) for sequence in sequences])


def test_a_row_begins_with_the_last_token_its_values_the_settings_and_the_pages():
    state, sequence = (
        new_state(),
        holder([4, 9], Token(6, (0.5, 0.25)), temperature=0.75, top_p=0.5, seed=2**62 + 1),
    )
    state.open([sequence])
    rows = rows_of(state, sequence)
    found = state.read(rows)
    assert (found.token_ids.item(), found.num_values.item(), found.num_sampled.item()) == (6, 2, 0)
    assert found.seeds.item() == 2**62 + 1
    assert state.values(rows).tolist() == [[0.5, 0.25]]
    settings = state.draw_settings(rows)
    assert [settings.temperature.tolist(), settings.top_p.tolist()] == [[0.75], [0.5]]
    assert state.page_table[rows].tolist() == [[4, 9, 4, 4, 4, 4]]


def test_sequences_have_rows_of_their_own_until_they_close():
    state = new_state(2)
    first, second, third = (holder([1]) for _ in range(3))
    state.open([first, second])
    assert state.row(first) != state.row(second)
    state.close(first)
    state.close(first)  # a sequence that has none is left alone
    state.open([third])
    assert len({state.row(second), state.row(third), state.padding_row}) == 3


def test_what_is_written_stands_in_its_row_beside_settings_and_pages():
    state, sequence = new_state(), holder([1], temperature=0.75)
    state.open([sequence])
    rows = rows_of(state, sequence)
    integers, values = state.sampled_columns
    integers[rows], values[rows] = torch.tensor([[3, 1, 2, 1, 9, 5]]), torch.tensor([[0.5, 0.0]])
    assert [column.item() for column in state.read(rows)] == [3, 1, 2, 1, 9, 5]
    assert state.values(rows).tolist() == [[0.5, 0.0]]
    assert state.draw_settings(rows).temperature.item() == 0.75
    assert state.page_table[rows].tolist() == [[1] * 6]


def test_a_sequence_that_comes_back_goes_on_where_it_was():
    state, sequence = new_state(), holder([1])
    sequence.tokens += [Token(3), Token(6, (0.5, 0.125))]
    state.open([sequence])
    found = state.read(rows_of(state, sequence))
    assert (found.token_ids.item(), found.num_sampled.item()) == (6, 2)


def test_a_page_is_written_where_its_position_needs_it():
    state, short, long = new_state(), holder([4]), holder([7, 2, 9])
    state.open([short, long])
    rows = rows_of(state, short, long)
    padded = torch.cat((rows, torch.tensor([state.padding_row])))
    pages = torch.tensor([8, 9, 0], dtype=torch.int32)
    state.add_pages(padded, torch.tensor([16, 40, -1]), pages, page_size=16)
    assert state.page_table[rows].tolist() == [[4, 8, 4, 4, 4, 4], [7, 2, 9, 7, 7, 7]]
    assert state.page_table[state.padding_row].tolist() == [0] * 6


def test_a_row_opened_anew_forgets_its_pages():
    state, sequence = new_state(), holder([4, 5, 6])
    state.open([sequence])
    sequence.cache.pages = [1, 2]
    state.open([sequence])
    assert state.page_table[rows_of(state, sequence)].tolist() == [[1, 2, 1, 1, 1, 1]]


def test_a_batch_may_sample_the_values_that_any_of_its_sequences_may():
    state, plain, spatial = new_state(), holder([1]), holder([2], rule=SPATIAL)
    state.open([plain, spatial])
    assert state.needs([plain]).sampling.value_kinds == 0
    assert state.needs([plain, spatial]).sampling.value_kinds == 2


def test_several_sequences_that_start_together_get_their_own_rows_and_leave_others_alone():
    state, known = new_state(num_rows=7), holder([9], seed=8)
    state.open([known])
    starting = [holder([page], seed=page) for page in (1, 2, 3, 4, 5)]
    state.open(starting)
    rows = rows_of(state, known, *starting)
    assert state.read(rows).seeds.tolist() == [8, 1, 2, 3, 4, 5]
    assert state.page_table[rows, 0].tolist() == [9, 1, 2, 3, 4, 5]
    assert state.page_table[state.padding_row].tolist() == [0] * 6


def test_a_step_needs_what_any_of_its_sequences_needs():
    state, plain = new_state(num_rows=6), holder([1])
    random, controlled = holder([2], temperature=0.5), holder([3], controls=SamplingParams(top_k=2))
    logged, adapted, bound = holder([4]), holder([5]), holder([6])
    logged.request.num_logprobs = 0
    adapted.adapter = Lease()
    bound.request.matcher = cast(Any, object())
    state.open([plain, random, controlled, logged, adapted, bound])
    nothing, drawn = SampleNeeds(False, 0), SampleNeeds(True, 0)
    assert state.needs([plain]) == (nothing, False)
    assert state.needs([plain, random]) == (drawn, False)
    assert state.needs([controlled]) == (nothing._replace(is_controlled=True), False)
    assert state.needs([plain, logged]) == (nothing._replace(with_logprobs=True), False)
    assert state.needs([plain, bound]) == (nothing._replace(is_restricted=True), False)
    assert state.needs([adapted, random]) == (drawn, True)
