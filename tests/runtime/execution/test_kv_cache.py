from typing import NamedTuple

import pytest
import torch

from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.scheduling.batch import Chunk
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.execution.packed_chunks import packed_chunks
from tests.runtime.sequences import new_sequence

CPU = torch.device("cpu")


class Sizes(NamedTuple):
    n_layers: int
    n_kv_heads: int
    head_dim: int


CONFIG = Sizes(n_layers=3, n_kv_heads=2, head_dim=8)
WIDTH = CONFIG.head_dim


def new_cache(num_pages=16, page_size=3, dtype=torch.float32):
    return KVCache(CONFIG, num_pages, page_size, CPU, dtype)


def holder(pages, length, num_image_tokens=0):
    sequence = new_sequence(length - num_image_tokens, num_image_tokens=num_image_tokens)
    sequence.cache.pages = pages
    return sequence


class Rows:
    """Random queries, keys and values of one sequence, for every layer."""

    def __init__(self, length, prefix_length=0, seed=0):
        torch.manual_seed(seed)
        self.length, self.prefix_length = length, prefix_length
        self.query = torch.randn(CONFIG.n_layers, length, 4, WIDTH)
        self.key, self.value = torch.randn(2, CONFIG.n_layers, length, 2, WIDTH)

    def of(self, layer, start, end):
        return tuple(rows[layer, start:end] for rows in (self.query, self.key, self.value))

    def attended(self, layer):
        """What every position sees, written out."""
        return DenseAttend(self.prefix_length)(layer, *self.of(layer, 0, self.length))


def prefill(cache, *chunks):
    return cache.prefill(packed_chunks(chunks, cache.page_size, CPU))


def context(pages, own):
    """The rows [positions, key/value heads, width] that lie in the pages `own`."""
    return pages[own].transpose(1, 2).flatten(0, 1)


def packed(parts):
    return tuple(torch.cat(rows) for rows in zip(*parts, strict=True))


def test_a_cache_holds_keys_and_values_of_every_layer():
    cache = new_cache(5, 3, torch.bfloat16)
    assert cache.key_pages.shape == cache.value_pages.shape == (CONFIG.n_layers, 5, 2, 3, WIDTH)
    assert cache.key_pages.dtype == cache.value_pages.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_page_is_told_in_bytes(dtype):
    cache = new_cache(5, 3, dtype)
    taken = cache.key_pages.nbytes + cache.value_pages.nbytes
    assert KVCache.bytes_per_page(CONFIG, 3, dtype) * 5 == taken


@pytest.mark.parametrize("layer", range(CONFIG.n_layers))
def test_a_prefill_writes_its_positions_and_attends(layer):
    cache, rows = new_cache(), Rows(8, prefix_length=5)
    sequence = holder([9, 1, 4], 8, num_image_tokens=4)
    attend = prefill(cache, Chunk(sequence, 0, 8))
    torch.testing.assert_close(attend(layer, *rows.of(layer, 0, 8)), rows.attended(layer))
    assert torch.equal(context(cache.key_pages[layer], [9, 1, 4])[:8], rows.key[layer])
    assert torch.equal(context(cache.value_pages[layer], [9, 1, 4])[:8], rows.value[layer])


def test_nothing_is_written_anywhere_else():
    cache, rows = new_cache(), Rows(8)
    prefill(cache, Chunk(holder([9, 1, 4], 8), 0, 8))(1, *rows.of(1, 0, 8))
    written = cache.key_pages.abs().sum(dim=(2, 4)).nonzero()
    assert {(layer, page) for layer, page, _ in written.tolist()} == {(1, 9), (1, 1), (1, 4)}
    assert len(written) == 8


def test_chunks_of_several_sequences_are_packed_one_after_the_other():
    cache = new_cache()
    first, second = Rows(7, prefix_length=4, seed=1), Rows(6, seed=2)
    pictured, plain = holder([3, 8, 0], 7, num_image_tokens=3), holder([5, 2], 6)
    prefill(cache, Chunk(pictured, 0, 4))(0, *first.of(0, 0, 4))
    attend = prefill(cache, Chunk(pictured, 4, 7), Chunk(plain, 0, 6))
    attended = attend(0, *packed([first.of(0, 4, 7), second.of(0, 0, 6)]))
    torch.testing.assert_close(attended, torch.cat((first.attended(0)[4:], second.attended(0))))


def test_a_chunk_ignores_pages_that_are_held_for_later():
    cache, rows = new_cache(), Rows(4)
    sequence = holder([6, 7, 8, 9], 12)
    cache.key_pages[:, 8:] = 1e4
    attended = prefill(cache, Chunk(sequence, 0, 4))(0, *rows.of(0, 0, 4))
    torch.testing.assert_close(attended, rows.attended(0))


@pytest.mark.parametrize("lengths", [(1, 3, 4), (8, 2, 9)])
def test_decoding_writes_the_newest_position_and_attends_to_all(lengths):
    cache = new_cache(num_pages=9)
    pages = ([8, 0, 3], [5], [2, 7, 1])
    everyone = [(holder(p, n), Rows(n, seed=n)) for p, n in zip(pages, lengths, strict=True)]
    for sequence, rows in everyone:
        if rows.length > 1:
            prefill(cache, Chunk(sequence, 0, rows.length - 1))(0, *rows.of(0, 0, rows.length - 1))
    table = torch.tensor([own + own[:1] * (3 - len(own)) for own in pages], dtype=torch.int32)
    attend = cache.decode(torch.tensor(lengths) - 1, table)
    attended = attend(0, *packed([rows.of(0, rows.length - 1, rows.length) for _, rows in everyone]))
    wanted = torch.stack([rows.attended(0)[-1] for _, rows in everyone])
    torch.testing.assert_close(attended, wanted, rtol=1e-4, atol=1e-5)
    for sequence, rows in everyone:
        assert torch.equal(context(cache.key_pages[0], sequence.cache.pages)[: rows.length], rows.key[0])


def test_a_float8_cache_is_read_back_with_its_scales():
    cache, rows = new_cache(dtype=torch.float8_e4m3fn), Rows(1, seed=3)
    assert cache.key_scales is not None
    assert cache.value_scales is not None
    cache.key_scales[1], cache.value_scales[1] = 0.25, 4.0
    attend = cache.decode(torch.tensor([0]), torch.tensor([[2]], dtype=torch.int32))
    attended = attend(1, *rows.of(1, 0, 1))
    torch.testing.assert_close(attended, rows.attended(1), rtol=0.07, atol=4 * 2**-9)
    torch.testing.assert_close(
        4 * cache.value_pages[1, 2, :, 0].float(), rows.value[1, 0], rtol=0.07, atol=4 * 2**-9
    )
