"""Each row gets the product with the matrices of its own slot."""

import pytest
import torch

from kestrel_ops import ExpertAdapters, LowRank, add_low_rank, mixture_of_experts
from kestrel_ops.experts.library_mixture_of_experts import mixture_of_experts as library_experts
from kestrel_ops.lora import library_add_low_rank as library


def random_low_rank(chance: torch.Generator, *stack: int, rank: int, ins: int, outs: int) -> LowRank:
    return LowRank(
        torch.randn((*stack, rank, ins), generator=chance), torch.randn((*stack, rank, outs), generator=chance)
    )


def test_each_row_gets_the_product_of_its_slot():
    chance = torch.Generator().manual_seed(1)
    weights = random_low_rank(chance, 3, rank=2, ins=5, outs=7)
    rows, out = torch.randn(6, 5, generator=chance), torch.randn(6, 7, generator=chance)
    slots = torch.tensor([0, 3, 1, 0, 3, 2])
    found = out.clone()
    add_low_rank(found, rows, weights, slots)
    for row, slot in enumerate(slots.tolist()):
        added = rows[row] @ weights.a[slot - 1].T @ weights.b[slot - 1] if slot else 0
        torch.testing.assert_close(found[row], out[row] + added)
    assert torch.equal(found[0], out[0]), "a row without an adapter keeps every bit"


def test_experts_with_adapters_are_those_with_the_products_merged():
    chance = torch.Generator().manual_seed(2)
    experts, dim, inner, tokens = 4, 6, 3, 9
    up = torch.randn(experts, 2 * inner, dim, generator=chance)
    down = torch.randn(experts, dim, inner, generator=chance)
    adapters = ExpertAdapters(
        random_low_rank(chance, 2, experts, rank=2, ins=dim, outs=2 * inner),
        random_low_rank(chance, 2, experts, rank=2, ins=inner, outs=dim),
        torch.randint(0, 3, (tokens,), generator=chance),
    )
    hidden = torch.randn(tokens, dim, generator=chance)
    logits = torch.randn(tokens, experts, generator=chance)
    found = mixture_of_experts(hidden, logits, up, down, 2, adapters=adapters)
    for slot in range(3):
        own = adapters.slots == slot
        merged_up, merged_down = up, down
        if slot:
            merged_up = up + (adapters.up.b[slot - 1].transpose(1, 2) @ adapters.up.a[slot - 1])
            merged_down = down + (adapters.down.b[slot - 1].transpose(1, 2) @ adapters.down.a[slot - 1])
        expected = mixture_of_experts(hidden[own], logits[own], merged_up, merged_down, 2)
        torch.testing.assert_close(found[own], expected)


def test_the_products_over_all_slots_are_those_of_each_slot():
    chance = torch.Generator().manual_seed(3)
    weights = random_low_rank(chance, 3, rank=4, ins=8, outs=5)
    rows, out = torch.randn(7, 8, generator=chance), torch.randn(7, 5, generator=chance)
    weights.a[1] = torch.nan  # of a slot that no row uses
    slots = torch.tensor([0, 1, 3, 3, 0, 1, 3])
    expected, found = out.clone(), out.clone()
    add_low_rank(expected, rows, weights, slots)
    library.add_low_rank(found, rows, weights, slots)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[slots == 0], out[slots == 0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_experts_of_the_library_take_adapters_as_the_definition_does(dtype: torch.dtype, tolerance: float):
    chance = torch.Generator().manual_seed(4)
    experts, dim, inner, tokens = 4, 16, 8, 12
    up = torch.randn(experts, 2 * inner, dim, generator=chance).to(dtype) / 4
    down = torch.randn(experts, dim, inner, generator=chance).to(dtype) / 4
    low_ranks = (
        random_low_rank(chance, 4, experts, rank=2, ins=dim, outs=2 * inner),
        random_low_rank(chance, 4, experts, rank=2, ins=inner, outs=dim),
    )
    of_up, of_down = (LowRank(pair.a.to(dtype) / 2, pair.b.to(dtype) / 2) for pair in low_ranks)
    adapters = ExpertAdapters(of_up, of_down, torch.randint(0, 5, (tokens,), generator=chance))
    hidden = torch.randn(tokens, dim, generator=chance).to(dtype)
    logits = torch.randn(tokens, experts, generator=chance)
    expected = mixture_of_experts(hidden, logits, up, down, 2, adapters=adapters)
    plain = mixture_of_experts(hidden, logits, up, down, 2)
    found = library_experts(hidden, logits, up, down, 2, adapters=adapters)
    size = float(expected.abs().max())
    assert float((expected - plain).abs().max()) > 10 * tolerance * size, "else the test shows nothing"
    torch.testing.assert_close(found, expected, atol=tolerance * size, rtol=0)
