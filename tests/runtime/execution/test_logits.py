"""Penalties and biases, each against its definition, alone and in mixed batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.execution.logits import AllowedTokens, num_words
from kestrel_runtime.execution.request_state import RequestState
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.runtime.sequences import new_sequence

VOCABULARY = 7
CPU = torch.device("cpu")
some_ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
some_biases = st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=3)
some_controls = st.builds(
    SamplingParams,
    repetition_penalty=st.none() | st.floats(0.125, 10, width=32),
    presence_penalty=st.none() | st.floats(-2, 2, width=32),
    frequency_penalty=st.none() | st.floats(-2, 2, width=32),
    logit_bias=some_biases.map(lambda biases: tuple(biases.items())),
)
EVERYTHING = SamplingParams(
    repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((2, -3.0), (5, 4.0))
)


def new_state(num_rows: int) -> RequestState:
    return RequestState(
        CPU,
        lambda grammar, state: 0,
        lambda _: 0,
        num_rows=num_rows,
        max_pages=1,
        values_per_token=1,
        vocab_size=VOCABULARY,
    )


def sequence_of(controls: SamplingParams | None, prompt: list[int], generated: list[int]) -> TokenSequence:
    """The first token of the prompt is 0."""
    sequence = new_sequence([Token(0), *map(Token, prompt)], controls=controls)
    sequence.tokens += map(Token, generated)
    sequence.cache.pages = [0]
    return sequence


def adjusted(state: RequestState, sequences: list[TokenSequence], logits: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([state.row(sequence) for sequence in sequences])
    return state.adjustments.apply(logits, rows, state.adjustment_settings(rows))


def by_definition(
    controls: SamplingParams | None, prompt: list[int], generated: list[int], logits: list[float]
) -> list[float]:
    if controls is None:
        return logits
    biases = dict(controls.logit_bias)
    found: list[float] = []
    for token_id, logit in enumerate(logits):
        if token_id in prompt or token_id in generated:
            repetition = controls.repetition_penalty or 1.0
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= (controls.frequency_penalty or 0.0) * generated.count(token_id)
        logit -= (controls.presence_penalty or 0.0) * (token_id in generated)
        found.append(logit + biases.get(token_id, 0.0))
    return found


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.none() | some_controls, some_ids, some_ids), min_size=1, max_size=5), st.integers(0, 99)
)
def test_logits_are_adjusted_as_defined_alone_and_together(
    histories: list[tuple[SamplingParams | None, list[int], list[int]]], seed: int
) -> None:
    logits = torch.randn(len(histories), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    sequences = [sequence_of(*history) for history in histories]
    state = new_state(len(sequences))
    state.open(sequences)
    together = adjusted(state, sequences, logits)
    for place, history in enumerate(histories):
        wanted = by_definition(*history, logits[place].tolist())
        assert together[place].tolist() == pytest.approx(wanted, abs=1e-4)
        alone = adjusted(state, [sequences[place]], logits[place : place + 1])
        assert torch.equal(alone[0], together[place])


def test_tokens_count_as_they_are_generated_as_if_they_had_been_known() -> None:
    """As after a preemption, where the row is written anew."""
    generated = [3, 3, 5, 1, 3, 0]
    running, known = sequence_of(EVERYTHING, [4, 5], []), sequence_of(EVERYTHING, [4, 5], generated)
    state = new_state(2)
    state.open([running, known])
    row = torch.tensor([state.row(running)])
    for token_id in generated:
        state.adjustments.count(row, torch.tensor([token_id]))
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    before = adjusted(state, [running], logits)
    assert torch.equal(before, adjusted(state, [known], logits))
    running.tokens += map(Token, generated)
    state.open([running])
    assert torch.equal(before, adjusted(state, [running], logits))


@pytest.mark.parametrize("controls", [None, SamplingParams(top_k=3), SamplingParams(presence_penalty=1.0)])
def test_a_row_has_nothing_of_its_last_owner(controls: SamplingParams | None) -> None:
    state = new_state(1)
    first = sequence_of(EVERYTHING, [1, 2, 3], [4, 5, 6])
    state.open([first])
    state.close(first)
    second = sequence_of(controls, [1], [])
    state.open([second])
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    assert torch.equal(adjusted(state, [second], logits), logits)


def test_padding_is_adjusted_by_nothing_however_often_it_is_counted() -> None:
    state = new_state(1)
    padding = torch.full((3,), state.padding_row)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(3))
    for _ in range(5):
        state.adjustments.count(padding, torch.tensor([1, 1, 2]))
    assert torch.equal(state.adjustments.apply(logits, padding, state.adjustment_settings(padding)), logits)


def test_the_first_token_of_a_prompt_is_not_penalised() -> None:
    sequence = sequence_of(SamplingParams(repetition_penalty=2.0), [3], [])
    state = new_state(1)
    state.open([sequence])
    assert adjusted(state, [sequence], torch.ones(1, VOCABULARY)).tolist() == [[1, 1, 1, 0.5, 1, 1, 1]]


CPU = torch.device("cpu")
VOCAB_SIZE = 77


def mask_of(allowed: set[int]) -> NDArray[np.int32]:
    bits = np.zeros(num_words(VOCAB_SIZE) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_in(table: AllowedTokens, rows: list[int]) -> list[set[int]]:
    logits = table.apply(torch.zeros(len(rows), VOCAB_SIZE), torch.tensor(rows))
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


EVERY_TOKEN = set(range(VOCAB_SIZE))


@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 4), st.none() | st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1), min_size=1
        ),
        max_size=6,
    )
)
def test_each_row_has_the_mask_that_was_written_last(steps: list[dict[int, set[int] | None]]) -> None:
    table = AllowedTokens(5, VOCAB_SIZE, CPU)
    expected = [EVERY_TOKEN] * 5
    for step in steps:
        table.write(list(step), [None if allowed is None else mask_of(allowed) for allowed in step.values()])
        for row, allowed in step.items():
            expected[row] = EVERY_TOKEN if allowed is None else allowed
        assert allowed_in(table, list(range(5))) == expected


def test_the_logits_of_allowed_tokens_keep_their_bits() -> None:
    table = AllowedTokens(3, VOCAB_SIZE, CPU)
    table.write([1], [mask_of({0, 31, 32, 76})])
    logits = torch.randn(2, VOCAB_SIZE)
    masked = table.apply(logits, torch.tensor([1, 2]))
    assert torch.equal(masked[1], logits[1])
    assert torch.equal(masked[0, [0, 31, 32, 76]], logits[0, [0, 31, 32, 76]])
    assert masked[0, 33:76].isinf().all()


def test_a_row_is_repeated_in_a_batch_for_padding() -> None:
    table = AllowedTokens(3, VOCAB_SIZE, CPU)
    table.write([0], [mask_of({5})])
    assert allowed_in(table, [2, 0, 2, 2]) == [EVERY_TOKEN, {5}, EVERY_TOKEN, EVERY_TOKEN]


def test_the_memory_of_a_table_is_what_it_says() -> None:
    assert AllowedTokens.num_bytes(5, VOCAB_SIZE) == 5 * 3 * 4
    assert AllowedTokens.num_bytes(5, 96) == 5 * 3 * 4
