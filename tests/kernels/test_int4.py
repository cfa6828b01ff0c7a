"""Weights of 4 bits: what they stand for, and mixtures of experts that have them."""

import pytest
import torch

from kestrel_ops import ExpertAdapters, LowRank, dequantise_int4, quantise_int4
from kestrel_ops.experts.reference import mixture_of_experts as definition
from tests.kernels.implementations import DEVICE, implementation_name, implementations, relative_error

every_implementation = pytest.mark.parametrize(
    "mixture_of_experts", implementations("mixture_of_experts"), ids=implementation_name
)
# By type: float32 is exact. Where tokens are rounded to float8, both products have the errors of that.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 0.01, torch.float16: 2e-3}
FLOAT8_TOLERANCE = 0.07


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("num_columns", [1, 48, 64, 65, 128, 200, 300])
def test_normal_weights_are_off_by_nine_per_cent_in_any_number_of_columns(num_columns):
    weight = random(max(3, 4000 // num_columns), num_columns)
    stored = dequantise_int4(*quantise_int4(weight), num_columns)
    assert stored.shape == weight.shape
    assert relative_error(stored, weight) < 0.094


def test_weights_take_half_a_byte_and_their_scales_a_thirty_second():
    packed, scales = quantise_int4(random(6, 256))
    assert (packed.dtype, scales.dtype) == (torch.uint8, torch.bfloat16)
    assert (packed.nbytes, scales.nbytes) == (6 * 256 // 2, 6 * 256 // 32)


def test_what_is_stored_is_quantised_to_itself():
    stored = dequantise_int4(*quantise_int4(random(9, 300)), 300)
    assert torch.equal(dequantise_int4(*quantise_int4(stored), 300), stored)


def test_zeros_stay_zeros_and_large_columns_spoil_their_own_group_alone():
    weight = random(4, 256)
    weight[1, 64:128] = 0
    weight[2, 70] = 1e4
    stored = dequantise_int4(*quantise_int4(weight), 256)
    assert (stored[1, 64:128] == 0).all()
    others = [*range(64), *range(128, 256)]
    assert relative_error(stored[:, others], weight[:, others]) < 0.11


def test_the_sign_and_the_order_of_weights_are_kept():
    weight = torch.tensor([[1.0, 3, 5, 7, 10, 14, 20, 28, -1, -3, -5, -7, -10, -14, -20, -28] * 8], device=DEVICE)
    assert torch.equal(dequantise_int4(*quantise_int4(weight), 128), weight)


class Experts:
    """Random tokens, and experts of 4 bits."""

    def __init__(self, num_tokens, dim, inner, dtype, num_experts=3):
        self.num_experts, self.dim, self.inner = num_experts, dim, inner
        self.hidden = random(num_tokens, dim).to(dtype)
        self.logits = random(num_tokens, num_experts, seed=2).to(dtype)
        stacks = random(num_experts, 2 * inner, dim, seed=3) / dim**0.5, random(num_experts, dim, inner, seed=4)
        (self.up, self.up_scale), (self.down, self.down_scale) = (
            map(torch.stack, zip(*(quantise_int4(expert) for expert in stack), strict=True)) for stack in stacks
        )
        self.adapters: ExpertAdapters | None = None

    def adapt(self, rank=3):
        """Two slots, of which each token has one or none."""
        num_tokens, dtype = len(self.hidden), self.hidden.dtype
        shapes = (self.dim, 2 * self.inner), (self.inner, self.dim)
        up, down = (
            LowRank(
                random(2, self.num_experts, rank, width, seed=5).to(dtype) / width**0.5,
                random(2, self.num_experts, rank, out, seed=6).to(dtype),
            )
            for width, out in shapes
        )
        self.adapters = ExpertAdapters(up, down, torch.arange(num_tokens, device=DEVICE) % 3)

    def run(self, operation, dtype=None):
        adapters = self.adapters
        if dtype is not None and adapters is not None:
            up, down = (LowRank(own.a.to(dtype), own.b.to(dtype)) for own in (adapters.up, adapters.down))
            adapters = ExpertAdapters(up, down, adapters.slots)
        hidden = self.hidden if dtype is None else self.hidden.to(dtype)
        stacks = self.up, self.down, 2, self.up_scale, self.down_scale
        return operation(hidden, self.logits, *stacks, adapters)


def tolerance(operation, dtype):
    rounds = implementation_name(operation) in ("triton", "cuda") and dtype != torch.float32
    return FLOAT8_TOLERANCE if rounds else TOLERANCES[dtype]


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_tokens", "dim", "inner"), [(1, 64, 48), (5, 17, 7), (17, 140, 72)])
def test_mixtures_are_those_of_the_weights_that_are_stood_for(mixture_of_experts, num_tokens, dim, inner, dtype):
    experts = Experts(num_tokens, dim, inner, dtype)
    up, down = (
        torch.stack([dequantise_int4(*expert, width) for expert in zip(*stack, strict=True)])
        for stack, width in (((experts.up, experts.up_scale), dim), ((experts.down, experts.down_scale), inner))
    )
    wanted = definition(experts.hidden.float(), experts.logits, up, down, 2)
    mixed = experts.run(mixture_of_experts)
    assert mixed.dtype == dtype
    assert relative_error(mixed, wanted) < tolerance(mixture_of_experts, dtype)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_adapters_are_added_to_them(mixture_of_experts, num_tokens, dtype):
    experts = Experts(num_tokens, 40, 20, dtype)
    plain = experts.run(mixture_of_experts)
    experts.adapt()
    adapted = experts.run(mixture_of_experts)
    wanted = experts.run(definition, torch.float32)
    assert relative_error(adapted, wanted) < tolerance(mixture_of_experts, dtype)
    is_adapted = torch.arange(num_tokens) % 3 > 0
    assert torch.equal(adapted[~is_adapted], plain[~is_adapted]) or num_tokens == 1
    assert not any(torch.equal(*rows) for rows in zip(adapted[is_adapted], plain[is_adapted], strict=True))


@every_implementation
def test_every_run_gives_the_same_bits_and_what_is_not_chosen_does_not_count(mixture_of_experts):
    experts = Experts(5, 64, 32, torch.bfloat16)
    experts.logits[:, 1:] += 100
    first = experts.run(mixture_of_experts)
    experts.up_scale[0] = float("nan")
    assert all(torch.equal(experts.run(mixture_of_experts), first) for _ in range(2))
