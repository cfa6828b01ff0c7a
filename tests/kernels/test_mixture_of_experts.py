import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu

from kestrel_ops import mixture_of_experts


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
    def __init__(self, seed=0, num_tokens=5, num_experts=6, dim=8, inner=4):
        torch.manual_seed(seed)
        self.hidden = torch.randn(num_tokens, dim)
        self.logits = torch.randn(num_tokens, num_experts)
        self.up = torch.randn(num_experts, 2 * inner, dim)
        self.down = torch.randn(num_experts, dim, inner)

    def run(self, experts_per_token=2):
        return mixture_of_experts(self.hidden, self.logits, self.up, self.down, experts_per_token)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_it_is_the_weighted_sum_written_out(seed):
    draw = random.Random(seed)
    num_experts = draw.randint(1, 9)
    experts_per_token = draw.randint(1, num_experts)
    experts = Experts(seed, draw.randint(1, 12), num_experts, draw.randint(1, 9), draw.randint(1, 7))
    wanted = written_out(experts.hidden, experts.logits, experts.up, experts.down, experts_per_token)
    torch.testing.assert_close(experts.run(experts_per_token), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts_per_token", [1, 2, 6])
def test_the_weights_of_the_chosen_add_up_to_one(experts_per_token):
    experts = Experts()
    experts.up[:], experts.down[:] = experts.up[:1].clone(), experts.down[:1].clone()  # all the same expert
    alone = mixture_of_experts(experts.hidden, experts.logits[:, :1], experts.up[:1], experts.down[:1], 1)
    torch.testing.assert_close(experts.run(experts_per_token), alone, rtol=1e-4, atol=1e-4)


def test_a_gate_of_zero_leaves_a_plain_gelu_expert():
    experts = Experts(num_experts=1)
    experts.up[:, 4:] = 0
    wanted = gelu(experts.hidden @ experts.up[0, :4].T) @ experts.down[0].T
    torch.testing.assert_close(experts.run(1), wanted, rtol=1e-4, atol=1e-4)


def test_experts_that_are_not_chosen_do_not_count():
    experts = Experts()
    experts.logits[:, [1, 4]] += 100
    before = experts.run(2)
    experts.up[[0, 2, 3, 5]] = float("nan")
    assert torch.equal(experts.run(2), before)


def test_a_constant_on_all_logits_changes_nothing():
    experts = Experts()
    before = experts.run()
    experts.logits += 7
    torch.testing.assert_close(experts.run(), before, rtol=1e-4, atol=1e-4)


def test_a_token_is_the_same_in_any_company():
    experts = Experts(num_tokens=7)
    together = experts.run()
    for row in range(7):
        alone = mixture_of_experts(
            experts.hidden[row : row + 1], experts.logits[row : row + 1], experts.up, experts.down, 2
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_float8_with_scales_equals_the_weights_they_stand_for():
    experts = Experts()
    up, down = experts.up.to(torch.float8_e4m3fn), experts.down.to(torch.float8_e4m3fn)
    up_scale, down_scale = torch.rand(6, 8) + 0.5, torch.rand(6, 8) + 0.5
    scaled = mixture_of_experts(experts.hidden, experts.logits, up, down, 2, up_scale, down_scale)
    experts.up, experts.down = up.float() * up_scale[..., None], down.float() * down_scale[..., None]
    torch.testing.assert_close(scaled, experts.run(2))


def test_a_short_type_is_kept():
    experts = Experts()
    wanted = experts.run()
    experts.hidden, experts.logits = experts.hidden.bfloat16(), experts.logits.bfloat16()
    experts.up, experts.down = experts.up.bfloat16(), experts.down.bfloat16()
    short = experts.run()
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), wanted, rtol=0.1, atol=0.3)
