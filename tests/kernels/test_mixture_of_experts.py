import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu

from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    implementation_name,
    implementations,
    in_pairs,
    relative_error,
)

every_implementation = pytest.mark.parametrize(
    "mixture_of_experts", implementations("mixture_of_experts"), ids=implementation_name
)


def exact_gelu(values):
    return values * 0.5 * (1 + torch.erf(values / math.sqrt(2)))


def written_out(hidden, logits, up, down, experts_per_token):
    """Token by token in float64."""
    rows = []
    for vector, scores in zip(hidden.double(), logits.double(), strict=True):
        chosen = sorted(range(len(scores)), key=lambda expert: -scores[expert].item())[:experts_per_token]
        parts = [math.exp(scores[expert].item()) for expert in chosen]
        row = torch.zeros_like(vector)
        for expert, part in zip(chosen, parts, strict=True):
            both = up[expert].double() @ vector
            inner = len(both) // 2
            row += part / sum(parts) * (down[expert].double() @ (exact_gelu(both[:inner]) * (both[inner:] + 1)))
        rows.append(row)
    return torch.stack(rows).float()


class Experts:
    """Random tokens and experts; the tensors may be changed before `run`."""

    def __init__(self, mixture_of_experts, seed=0, num_tokens=5, num_experts=6, dim=8, inner=4):
        torch.manual_seed(seed)
        self.mixture_of_experts = mixture_of_experts
        self.hidden = torch.randn(num_tokens, dim, device=DEVICE)
        self.logits = torch.randn(num_tokens, num_experts, device=DEVICE)
        self.up = torch.randn(num_experts, 2 * inner, dim, device=DEVICE) / math.sqrt(dim)
        self.down = torch.randn(num_experts, dim, inner, device=DEVICE) / math.sqrt(inner)
        self.scales: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)

    def run(self, experts_per_token=2, positions=None):
        return self.mixture_of_experts(
            *(self.hidden, self.logits, self.up, self.down, experts_per_token, *self.scales), positions=positions
        )

    def wanted(self, experts_per_token=2):
        up, down = self.up.float(), self.down.float()
        if self.scales[0] is not None:
            up, down = up * self.scales[0][..., None], down * self.scales[1][..., None]
        return written_out(self.hidden, self.logits, up, down, experts_per_token)

    def shorten(self):
        """What a device multiplies in groups."""
        self.hidden, self.logits = self.hidden.bfloat16(), self.logits.bfloat16()
        self.up, self.down = self.up.bfloat16(), self.down.bfloat16()

    def quantise(self):
        scales = [stack.abs().amax(dim=-1) / 448 for stack in (self.up, self.down)]
        self.scales = scales[0], scales[1]
        self.up, self.down = (
            (stack / scale[..., None]).to(FLOAT8) for stack, scale in zip((self.up, self.down), scales, strict=True)
        )


@every_implementation
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1))
def test_it_is_the_weighted_sum_written_out(mixture_of_experts, seed):
    draw = random.Random(seed)
    num_experts = draw.randint(1, 9)
    experts_per_token = draw.randint(1, num_experts)
    sizes = draw.randint(1, 12), num_experts, draw.randint(1, 9), draw.randint(1, 7)
    experts = Experts(mixture_of_experts, seed, *sizes)
    wanted = experts.wanted(experts_per_token)
    torch.testing.assert_close(experts.run(experts_per_token), wanted, rtol=1e-4, atol=1e-4)


@every_implementation
@pytest.mark.parametrize(
    ("num_tokens", "experts_per_token", "sizes"),
    in_pairs([1, 5, 40], [1, 2, 6], [(32, 16), (40, 20), (36, 24), (17, 7)]),
    ids=str,
)
def test_tokens_of_a_short_type_go_to_their_experts(mixture_of_experts, num_tokens, experts_per_token, sizes):
    experts = Experts(mixture_of_experts, num_tokens=num_tokens, dim=sizes[0], inner=sizes[1])
    experts.shorten()
    mixed = experts.run(experts_per_token)
    assert mixed.dtype == torch.bfloat16
    assert relative_error(mixed, experts.wanted(experts_per_token)) < 0.02


@every_implementation
@pytest.mark.parametrize(
    ("num_tokens", "dtype", "sizes"),
    in_pairs([1, 40], [torch.float32, torch.bfloat16], [(32, 16), (40, 20), (17, 7)]),
    ids=str,
)
def test_float8_with_scales_equals_the_weights_they_stand_for(mixture_of_experts, num_tokens, dtype, sizes):
    experts = Experts(mixture_of_experts, num_tokens=num_tokens, dim=sizes[0], inner=sizes[1])
    experts.quantise()
    experts.hidden = experts.hidden.to(dtype)
    # Where both operands are float8, what goes into the experts is rounded as their weights were.
    rounds = DEVICE == "cuda" or implementation_name(mixture_of_experts) == "triton"
    tolerance = 1e-5 if dtype == torch.float32 else 0.08 if rounds else 0.02
    assert relative_error(experts.run(), experts.wanted()) < tolerance


@every_implementation
@pytest.mark.parametrize("experts_per_token", [1, 2, 6])
def test_the_weights_of_the_chosen_add_up_to_one(mixture_of_experts, experts_per_token):
    experts = Experts(mixture_of_experts)
    experts.up[:], experts.down[:] = experts.up[:1].clone(), experts.down[:1].clone()  # all the same expert
    alone = mixture_of_experts(experts.hidden, experts.logits[:, :1], experts.up[:1], experts.down[:1], 1)
    torch.testing.assert_close(experts.run(experts_per_token), alone, rtol=1e-4, atol=1e-4)


@every_implementation
def test_a_gate_of_zero_leaves_a_plain_gelu_expert(mixture_of_experts):
    experts = Experts(mixture_of_experts, num_experts=1)
    experts.up[:, 4:] = 0
    wanted = gelu(experts.hidden @ experts.up[0, :4].T) @ experts.down[0].T
    torch.testing.assert_close(experts.run(1), wanted, rtol=1e-4, atol=1e-4)


@every_implementation
@pytest.mark.parametrize("short", [False, True])
def test_experts_that_are_not_chosen_do_not_count(mixture_of_experts, short):
    experts = Experts(mixture_of_experts, dim=32, inner=16)
    experts.logits[:, [1, 4]] += 100
    if short:
        experts.shorten()
    before = experts.run(2)
    experts.up[[0, 2, 3, 5]] = float("nan")
    assert torch.equal(experts.run(2), before)


@every_implementation
def test_a_constant_on_all_logits_changes_nothing(mixture_of_experts):
    experts = Experts(mixture_of_experts)
    before = experts.run()
    experts.logits += 7
    torch.testing.assert_close(experts.run(), before, rtol=1e-4, atol=1e-4)


@every_implementation
def test_a_token_is_the_same_in_any_company(mixture_of_experts):
    experts = Experts(mixture_of_experts, num_tokens=7)
    together = experts.run()
    hidden, logits = experts.hidden, experts.logits
    for row in range(7):
        experts.hidden, experts.logits = hidden[row : row + 1], logits[row : row + 1]
        torch.testing.assert_close(together[row : row + 1], experts.run(), rtol=1e-4, atol=1e-4)


@every_implementation
@pytest.mark.parametrize("num_tokens", [1, 33, 64, 70])
@pytest.mark.parametrize("experts_per_token", [1, 3])
def test_one_expert_may_have_every_token_and_others_none(mixture_of_experts, num_tokens, experts_per_token):
    experts = Experts(mixture_of_experts, num_tokens=num_tokens, num_experts=7, dim=20, inner=9)
    experts.logits[:, 5] += 100
    experts.logits[:, [0, 3]] -= 100
    wanted = experts.wanted(experts_per_token)
    torch.testing.assert_close(experts.run(experts_per_token), wanted, rtol=1e-4, atol=1e-4)


@every_implementation
@pytest.mark.parametrize("num_tokens", [1, 19])
@pytest.mark.parametrize("is_float8", [False, True])
def test_every_run_gives_the_same_bits(mixture_of_experts, num_tokens, is_float8):
    experts = Experts(mixture_of_experts, num_tokens=num_tokens, dim=32, inner=16)
    if is_float8:
        experts.quantise()
        experts.hidden = experts.hidden.bfloat16()
    else:
        experts.shorten()
    first = experts.run()
    assert all(torch.equal(experts.run(), first) for _ in range(2))


@every_implementation
def test_of_equal_logits_the_first_experts_are_chosen_alike(mixture_of_experts):
    experts = Experts(mixture_of_experts, num_tokens=3)
    experts.logits[:] = 0.5
    experts.logits[:, 4] = 2.0
    experts.up[:], experts.down[:] = experts.up[:1].clone(), experts.down[:1].clone()  # whichever are chosen
    torch.testing.assert_close(experts.run(3), experts.wanted(3), rtol=1e-4, atol=1e-4)


@every_implementation
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_any_type_and_size_choose_the_same(mixture_of_experts, num_tokens, dtype):
    experts = Experts(mixture_of_experts, num_tokens=num_tokens, num_experts=37, dim=9, inner=4)
    experts.logits = (experts.logits * 20).to(dtype)
    torch.testing.assert_close(experts.run(5), experts.wanted(5), rtol=1e-4, atol=1e-4)


@every_implementation
@pytest.mark.parametrize("is_float8", [False, True])
def test_a_token_that_is_not_a_number_spoils_no_other(mixture_of_experts, is_float8):
    experts = Experts(mixture_of_experts, num_tokens=7)
    if is_float8:
        experts.quantise()
    before = experts.run()
    experts.hidden[3], experts.logits[3] = float("nan"), float("nan")
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(experts.run()[others], before[others], rtol=1e-4, atol=1e-4)


@every_implementation
@pytest.mark.parametrize("num_tokens", [7, 70])
def test_padding_chooses_no_expert_and_gives_zeros(mixture_of_experts, num_tokens):
    experts = Experts(mixture_of_experts, num_tokens=num_tokens)
    positions = torch.arange(num_tokens, device=DEVICE)
    positions[[1, num_tokens - 1]] = -1
    is_there = positions >= 0
    experts.logits[is_there, 4] = -100.0
    experts.logits[~is_there, 4] = 100.0
    wanted = experts.run(3)
    experts.up[4] = torch.nan  # which only padding would choose
    found = experts.run(3, positions)
    torch.testing.assert_close(found[is_there], wanted[is_there], rtol=1e-4, atol=1e-4)
    assert (found[~is_there] == 0).all()
