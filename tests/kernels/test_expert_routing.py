"""The lists that lead tokens to their experts."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.implementations import DEVICE, FLOAT8

routing = pytest.importorskip("kestrel_ops.experts.triton_routing", reason="needs Triton")


def routed(logits, choices, block_tokens, positions=None, *, quantises=False, hidden=None):
    hidden = torch.randn(len(logits), 6, device=DEVICE) if hidden is None else hidden
    return routing.route(
        *(hidden, logits.to(DEVICE), choices, block_tokens, positions), quantises=quantises, is_dependent=False
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_lists_hold_every_pair_once_in_the_order_of_experts_and_tokens(seed):
    draw = random.Random(seed)
    num_experts = draw.randint(1, 12)
    num_tokens, choices = draw.choice((1, 2, 15, 63, 64, 65, 140)), draw.randint(1, num_experts)
    block = draw.choice((16, 32))
    torch.manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts)
    logits[:, draw.randrange(num_experts)] += draw.choice((0, 100))
    found = routed(logits, choices, block)
    best = logits.topk(choices, dim=1).indices
    lists = [
        [token * choices + rank for token, rank in (best == expert).nonzero().tolist()]
        for expert in range(num_experts)
    ]
    assert found.pairs.tolist() == [pair for own in lists for pair in own]
    ends = list(itertools.accumulate(map(len, lists)))
    blocks = [
        [(expert, end - len(own) + begin, min(block, len(own) - begin)) for begin in range(0, len(own), block)]
        for expert, (own, end) in enumerate(zip(lists, ends, strict=True))
    ]
    items = list(zip(*found.items.tolist(), strict=True))
    wanted = [item for own in blocks for item in own]
    assert items[: len(wanted)] == wanted
    assert not any(count for _, _, count in items[len(wanted) :])
    torch.testing.assert_close(found.weights.cpu(), logits.topk(choices, dim=1).values.softmax(dim=1))


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 65, 130])
def test_tokens_are_rounded_to_float8_by_their_largest_value(num_tokens):
    hidden = torch.randn(num_tokens, 21, device=DEVICE)
    hidden[0] = 0
    found = routed(torch.randn(num_tokens, 4), 2, 16, quantises=True, hidden=hidden)
    assert found.rows.dtype == FLOAT8
    restored = found.rows.float() * found.row_scales[:, None]
    assert ((restored - hidden).abs() <= hidden.abs().amax(dim=1, keepdim=True) / 28).all()
    assert torch.equal(restored[0], hidden[0])


@pytest.mark.parametrize("num_tokens", [5, 64, 140])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_padding_is_in_no_list(num_tokens, dtype):
    logits = torch.randn(num_tokens, 4)
    positions = torch.arange(num_tokens, dtype=dtype, device=DEVICE)
    positions[1::3] = -1
    found = routed(logits, 2, 16, positions)
    present = [token for token in range(num_tokens) if token % 3 != 1]
    counts = found.items[2].tolist()
    assert sum(counts) == 2 * len(present)
    best = logits.topk(2, dim=1).indices
    listed = {
        (found.items[0, item].item(), pair // 2)
        for item, count in enumerate(counts)
        for pair in found.pairs[found.items[1, item] :][:count].tolist()
    }
    assert listed == {(expert, token) for token in present for expert in best[token].tolist()}
    assert (found.weights[1::3] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logits_that_are_no_numbers_lead_to_experts_that_exist(value):
    logits = torch.randn(5, 5)
    logits[2] = value
    found = routed(logits, 3, 16)
    assert sorted(found.pairs.tolist()) == list(range(15))
    assert max(found.items[0, found.items[2] > 0].tolist()) < 5


def test_as_many_items_are_reserved_as_any_routing_needs():
    for num_tokens, num_experts, choices, block in ((1, 64, 8, 16), (64, 64, 8, 16), (40, 3, 2, 16), (9, 9, 1, 32)):
        most = routing.most_items(num_tokens, num_experts, choices, block)
        one_for_all = torch.zeros(num_tokens, num_experts)
        one_for_all[:, 0] = 9
        spread = torch.zeros(num_tokens, num_experts)
        spread.scatter_(1, (torch.arange(num_tokens * choices) % num_experts).view(num_tokens, choices), 9.0)
        for logits in (one_for_all, spread):
            counts = logits.topk(choices, dim=1).indices.flatten().bincount(minlength=num_experts)
            assert (-(-counts // block)).sum() <= most
