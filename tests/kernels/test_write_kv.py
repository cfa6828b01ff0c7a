import pytest
import torch

from kestrel_ops import write_kv


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_each_row_lands_in_its_slot_and_nowhere_else(page_size):
    torch.manual_seed(page_size)
    shape = (5, 2, page_size, 4)
    before = torch.randn(shape), torch.randn(shape)
    key_pages, value_pages = before[0].clone(), before[1].clone()
    slots = torch.randperm(5 * page_size)[:4]
    key, value = torch.randn(4, 2, 4), torch.randn(4, 2, 4)
    write_kv(key, value, key_pages, value_pages, slots)
    for slot in range(5 * page_size):
        page, place = divmod(slot, page_size)
        rows = (slots == slot).nonzero().flatten().tolist()
        wanted = (
            (key[rows[0]], value[rows[0]])
            if rows
            else (
                before[0][page, :, place],
                before[1][page, :, place],
            )
        )
        assert torch.equal(key_pages[page, :, place], wanted[0])
        assert torch.equal(value_pages[page, :, place], wanted[1])


def test_it_writes_through_a_layer_of_a_larger_cache():
    cache = torch.zeros(3, 2, 1, 2, 4), torch.zeros(3, 2, 1, 2, 4)
    write_kv(torch.ones(1, 1, 4), 2 * torch.ones(1, 1, 4), cache[0][1], cache[1][1], torch.tensor([3]))
    assert cache[0].nonzero()[:, :4].unique(dim=0).tolist() == [[1, 1, 0, 1]]
    assert cache[1].sum() == 8


def test_a_float8_cache_holds_rows_over_their_scale_and_saturates():
    pages = torch.zeros(2, 2, 1, 2, 4, dtype=torch.float8_e4m3fn)
    key, value = torch.full((1, 1, 4), 3.0), torch.full((1, 1, 4), -1e6)
    write_kv(key, value, pages[0], pages[1], torch.tensor([2]), torch.tensor([0.5]), torch.tensor([2.0]))
    assert pages[0].float().sum() == 4 * 6
    assert pages[1, 1, 0, 0].float().tolist() == [-448.0] * 4


def test_padding_rows_are_not_written():
    pages = torch.zeros(2, 3, 1, 2, 4)
    write_kv(torch.ones(3, 1, 4), torch.ones(3, 1, 4), pages[0], pages[1], torch.tensor([-1, 4, -7]))
    assert pages[0].nonzero()[:, :3].unique(dim=0).tolist() == [[2, 0, 0]]
