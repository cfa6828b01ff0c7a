"""Whatever the launch configuration, the kernels of the experts give the same."""

import dataclasses

import pytest
import torch

from kestrel_ops import ExpertAdapters, LowRank, mixture_of_experts
from kestrel_ops.device_limits import HOPPER_SHARED_BYTES, PORTABLE_SHARED_BYTES, DeviceLimits
from tests.kernels.implementations import DEVICE, FLOAT8, in_pairs, relative_error

configs = pytest.importorskip("kestrel_ops.experts.triton_launch_configs", reason="needs Triton")
triton_experts = pytest.importorskip("kestrel_ops.experts.triton_mixture_of_experts", reason="needs Triton")

DIM, INNER, EXPERTS, CHOICES = 52, 36, 5, 3


def a_layer(num_tokens, dtype=torch.float32):
    torch.manual_seed(7)
    hidden = torch.randn(num_tokens, DIM, device=DEVICE).to(dtype)
    logits = torch.randn(num_tokens, EXPERTS, device=DEVICE)
    up = torch.randn(EXPERTS, 2 * INNER, DIM, device=DEVICE).to(dtype) / 8
    down = torch.randn(EXPERTS, DIM, INNER, device=DEVICE).to(dtype) / 6
    return hidden, logits, up, down


def quantised(up, down):
    scales = [stack.abs().amax(dim=-1) / 448 for stack in (up, down)]
    stacks = [(stack / scale[..., None]).to(FLOAT8) for stack, scale in zip((up, down), scales, strict=True)]
    return (*stacks, *scales)


CONFIGS = [
    configs.ExpertsConfig(
        block, configs.ProductConfig(rows, columns, 4, 2), configs.ProductConfig(16, 32, 4, 3, False)
    )
    for block, rows, columns in ((16, 16, 32), (32, 32, 64), (16, 64, 32))
]
CONFIGS.append(dataclasses.replace(CONFIGS[1], quantises_rows=True))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_every_configuration_gives_what_the_definition_gives(config, num_tokens):
    layer = a_layer(num_tokens)
    found = triton_experts.mixture_of_experts(*layer, CHOICES, config=config)
    torch.testing.assert_close(found, mixture_of_experts(*layer, experts_per_token=CHOICES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_float8", [False, True])
def test_columns_may_come_in_turns(is_float8):
    inner, rows, columns = 256, 64 if is_float8 else 32, 32
    hidden, logits, _, _ = a_layer(21)
    up = torch.randn(EXPERTS, 2 * inner, DIM, device=DEVICE) / 8
    down = torch.randn(EXPERTS, DIM, inner, device=DEVICE) / 16
    scales = ()
    if is_float8:
        hidden = hidden.bfloat16()
        up, down, *scales = quantised(up, down)
    product = configs.ProductConfig(rows, columns, 4, 2)
    layer = hidden, logits, up, down, CHOICES, *scales
    plain, *in_turns = (
        triton_experts.mixture_of_experts(
            *layer, config=configs.ExpertsConfig(16, product, dataclasses.replace(product, turns=count))
        )
        for count in (1, 2, 4)
    )
    assert all(torch.equal(found, plain) for found in in_turns)
    wanted = mixture_of_experts(hidden.float(), logits, up, down, CHOICES, *scales, adapters=None)
    assert relative_error(plain, wanted) < (0.06 if is_float8 else 1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_scales_belong_to_the_columns_of_any_configuration(config):
    if DEVICE != "cpu" and config.expand.rows < 32:
        pytest.skip("tensor cores multiply at least 32 columns of float8")
    hidden, logits, up, down = a_layer(21)
    up[:, : INNER // 2] *= 3  # columns whose values need scales of their own
    up, down, up_scale, down_scale = quantised(up, down)
    layer = logits, up, down, CHOICES, up_scale, down_scale
    found = triton_experts.mixture_of_experts(hidden.bfloat16(), *layer, config=config)
    wanted = mixture_of_experts(hidden.bfloat16().float(), *layer)
    assert relative_error(found, wanted) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_bytes", [2048, 8192])
def test_one_token_is_the_same_by_its_own_kernels(dtype, num_bytes):
    layer = a_layer(1, dtype)
    config = configs.OneTokenConfig(num_bytes, num_bytes, 4)
    found = triton_experts.mixture_of_experts(*layer, CHOICES, config=config)
    hidden, logits, up, down = (part.float() for part in layer)
    wanted = mixture_of_experts(hidden, logits, up, down, CHOICES)
    assert relative_error(found, wanted) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64, 200, 6000])
@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16, FLOAT8], ids=str)
@pytest.mark.parametrize(
    "limits",
    [DeviceLimits((8, 6), PORTABLE_SHARED_BYTES), DeviceLimits((9, 0), HOPPER_SHARED_BYTES)],
    ids=["portable", "Hopper"],
)
def test_plans_of_all_sizes_have_what_tensor_cores_need(num_tokens, operand, limits):
    config = configs.config_for(num_tokens, 64, 8, operand, limits)
    assert config.block_tokens >= 16
    for part in (config.expand, config.contract):
        # A group of four warps multiplies with 64 rows on Hopper; elsewhere warps divide the tokens, too.
        tiles = part.rows if limits.is_hopper else part.rows * config.block_tokens // 16
        assert tiles >= 16 * part.num_warps
        assert part.columns >= (32 if operand == FLOAT8 else 16)
        assert part.num_stages >= 2
    rows = 2 * config.expand.rows + config.block_tokens, config.contract.rows + config.block_tokens
    for part, operand_rows in zip((config.expand, config.contract), rows, strict=True):
        assert operand_rows * part.columns * operand.itemsize * part.num_stages <= limits.shared_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_a_device_without_float8_widens_every_value_of_float8_experts(num_tokens, dtype, monkeypatch):
    ampere = DeviceLimits((8, 0), PORTABLE_SHARED_BYTES)
    monkeypatch.setattr(DeviceLimits, "of", staticmethod(lambda device: ampere))
    hidden, logits, up, down = a_layer(num_tokens, dtype)
    numbers = torch.arange(256, device=DEVICE, dtype=torch.uint8).view(FLOAT8)
    numbers = numbers[numbers.float().isfinite()]
    up, down = (
        numbers.repeat(-(-each.numel() // len(numbers)))[: each.numel()].view_as(each) for each in (up, down)
    )
    scales = tuple(1e-3 * (1 + torch.rand(each.shape[:2], device=DEVICE)) for each in (up, down))
    found = triton_experts.mixture_of_experts(hidden, logits, up, down, CHOICES, scales[0], scales[1])
    wanted = mixture_of_experts(hidden.float(), logits, up, down, CHOICES, scales[0], scales[1])
    assert relative_error(found, wanted) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(("num_tokens", "is_float8", "rank"), in_pairs([1, 21], [False, True], [1, 3]), ids=str)
def test_adapters_are_added_to_both_products(num_tokens, is_float8, rank):
    hidden, logits, up, down = a_layer(num_tokens)
    scales = ()
    if is_float8:
        hidden = hidden.bfloat16()
        up, down, *scales = quantised(up, down)
    adapters = ExpertAdapters(
        LowRank(
            torch.randn(2, EXPERTS, rank, DIM, device=DEVICE) / 8,
            torch.randn(2, EXPERTS, rank, 2 * INNER, device=DEVICE),
        ),
        LowRank(
            torch.randn(2, EXPERTS, rank, INNER, device=DEVICE) / 6,
            torch.randn(2, EXPERTS, rank, DIM, device=DEVICE),
        ),
        torch.arange(num_tokens, device=DEVICE).flip(0) % 2 * 2,  # slots 0 and 2
    )
    adapters.up.a[0] = torch.nan  # of a slot that no token uses
    wanted = mixture_of_experts(hidden.float(), logits, up, down, CHOICES, *scales, adapters=adapters)
    found = triton_experts.mixture_of_experts(hidden, logits, up, down, CHOICES, *scales, adapters=adapters)
    plain = triton_experts.mixture_of_experts(hidden, logits, up, down, CHOICES, *scales)
    tolerance = 0.06 if is_float8 else 1e-5
    assert relative_error(found, wanted) < tolerance
    without = adapters.slots == 0
    if not is_float8 and num_tokens > 1:
        assert torch.equal(found[without], plain[without])
    assert num_tokens == 1 or relative_error(plain[~without], wanted[~without]) > 5 * tolerance
