import pytest
import torch

from kestrel_runtime.execution.embedding_slab import EmbeddingSlab


def new_slab():
    return EmbeddingSlab(3, 5, 2, torch.float32, torch.device("cpu"))


def test_sequences_have_entries_of_their_own_until_they_are_released():
    slab = new_slab()
    entries = [slab.acquire(sequence) for sequence in (11, 12, 13)]
    assert len(set(entries)) == 3
    assert slab.acquire(12) == slab.entry(12) == entries[1]
    slab.release(12)
    slab.release(12)  # a sequence without an entry is left alone
    with pytest.raises(KeyError):
        slab.entry(12)
    assert slab.acquire(14) == entries[1]


def test_clearing_frees_all_entries():
    slab = new_slab()
    for sequence in (1, 2, 3):
        slab.acquire(sequence)
    slab.clear()
    assert len({slab.acquire(sequence) for sequence in (4, 5, 6)}) == 3


def test_rows_are_the_positions_of_all_entries_in_their_order():
    slab = new_slab()
    slab.embeddings[2] = torch.arange(10.0).view(5, 2)
    assert slab.rows.shape == (15, 2)
    assert slab.rows[11].tolist() == [2, 3]
