import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_ops import decode_attention, prefill_attention
from tests.kernels.paged import GARBAGE, Heads, attend, padded, paged, visible_until

HEADS = (Heads(1, 1, 8), Heads(4, 4, 6), Heads(6, 2, 4), Heads(4, 1, 16))

FLOAT8 = torch.float8_e4m3fn


class Batch:
    """Random contexts of some lengths over pages, and one query for each."""

    def __init__(self, lengths, heads, page_size, seed=0):
        torch.manual_seed(seed)
        self.keys, self.values = [heads.context(n) for n in lengths], [heads.context(n) for n in lengths]
        self.queries = heads.queries(len(lengths))
        self.lengths = torch.tensor(lengths)
        self.key_pages, self.value_pages, self.tables = paged(self.keys, self.values, page_size)

    def run(self):
        return decode_attention(self.queries, self.key_pages, self.value_pages, padded(self.tables), self.lengths)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    heads=st.sampled_from(HEADS),
    page_size=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_is_attention_written_out(lengths, heads, page_size, seed):
    batch = Batch(lengths, heads, page_size, seed)
    wanted = [attend(*row) for row in zip(batch.queries, batch.keys, batch.values, strict=True)]
    torch.testing.assert_close(batch.run(), torch.stack(wanted), rtol=1e-4, atol=1e-5)


@settings(max_examples=25)
@given(
    length=st.integers(1, 23),
    heads=st.sampled_from(HEADS),
    page_size=st.integers(1, 7),
    prefix_length=st.sampled_from((0, 1, 6)),
)
def test_it_equals_the_last_row_of_a_prefill(length, heads, page_size, prefix_length):
    length += prefix_length
    batch = Batch([length], heads, page_size, seed=length)
    queries = torch.cat((heads.queries(length - 1), batch.queries))
    prefilled = prefill_attention(
        queries,
        batch.keys[0],
        batch.values[0],
        batch.key_pages,
        batch.value_pages,
        padded(batch.tables).int(),
        torch.tensor([0, length], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        visible_until([(0, prefix_length)], 0, length),
        length,
    )
    torch.testing.assert_close(batch.run()[0], prefilled[-1], rtol=1e-4, atol=1e-5)


def test_a_row_is_the_same_in_any_company():
    batch = Batch([5, 1, 17, 8], HEADS[2], 3)
    together = batch.run()
    for row in range(4):
        alone = decode_attention(
            batch.queries[row : row + 1],
            batch.key_pages,
            batch.value_pages,
            batch.tables[row][None],
            batch.lengths[row : row + 1],
        )
        torch.testing.assert_close(together[row], alone[0])


def test_what_lies_past_the_length_does_not_count():
    batch = Batch([7], HEADS[1], 4)
    before = batch.run()
    last_page = batch.tables[0][1]
    assert (batch.key_pages[last_page, :, 3:] == GARBAGE).all()  # position 7 has no owner
    batch.key_pages[last_page, :, 3:] = -GARBAGE
    batch.value_pages[last_page, :, 3:] = -GARBAGE
    assert torch.equal(batch.run(), before)
    batch.lengths -= 1
    assert not torch.allclose(batch.run(), before)


def test_what_is_not_a_number_past_the_length_does_not_count():
    batch = Batch([7], HEADS[1], 4)
    wanted = batch.run()
    last_page = batch.tables[0][1]
    batch.key_pages[last_page, :, 3:] = torch.nan
    batch.value_pages[last_page, :, 3:] = torch.nan
    assert torch.equal(batch.run(), wanted)


def test_a_single_position_gives_its_value_back():
    batch = Batch([1, 1], HEADS[2], 2)
    wanted = torch.stack(batch.values)[:, 0].repeat_interleave(3, dim=1)  # three query heads share a group
    torch.testing.assert_close(batch.run(), wanted)


def test_float8_pages_are_read_with_their_scales():
    batch = Batch([7, 3], HEADS[2], 4)
    wanted = batch.run()
    key_pages, value_pages = (batch.key_pages / 0.5).to(FLOAT8), (batch.value_pages / 0.25).to(FLOAT8)
    scales = torch.tensor([0.5]), torch.tensor([0.25])
    attended = decode_attention(batch.queries, key_pages, value_pages, padded(batch.tables), batch.lengths, *scales)
    assert (attended - wanted).norm() < 0.1 * wanted.norm()
