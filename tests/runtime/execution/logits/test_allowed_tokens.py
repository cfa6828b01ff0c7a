"""The table of masks: which tokens a row may have, and what rows without a constraint keep."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kestrel_runtime.execution.logits.allowed_tokens import AllowedTokens, num_words

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
