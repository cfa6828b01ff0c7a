"""The products of float8 experts in CUDA, and the routing before them."""

import pytest
import torch

from kestrel_ops.experts.reference import mixture_of_experts as definition
from tests.kernels.implementations import DEVICE, FLOAT8, relative_error

pytest.importorskip("triton", reason="needs Triton")
from kestrel_ops.experts import cuda_products, cuda_routing
from kestrel_ops.experts.cuda_mixture_of_experts import mixture_of_experts
from kestrel_ops.experts.cuda_products import CONFIGS, config_for
from kestrel_ops.experts.triton_mixture_of_experts import mixture_of_experts as triton_experts
from kestrel_ops.experts.triton_routing import route as route_by_triton

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
SHARED_BYTES = 228 * 1024  # of a multiprocessor, of which each program takes 1 KiB more than it asks for


def a_layer(num_tokens, num_experts=8, dim=256, inner=128, dtype=torch.bfloat16):
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, dim, device=DEVICE).to(dtype)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    up = torch.randn(num_experts, 2 * inner, dim, device=DEVICE) * dim**-0.5
    down = torch.randn(num_experts, dim, inner, device=DEVICE) * inner**-0.5
    scales = [stack.abs().amax(dim=-1) / 448 for stack in (up, down)]
    up, down = ((stack / scale[..., None]).to(FLOAT8) for stack, scale in zip((up, down), scales, strict=True))
    return hidden, logits, up, down, scales


def mixed(operation, layer, choices, positions=None, **more):
    hidden, logits, up, down, scales = layer
    return operation(hidden, logits, up, down, choices, *scales, None, positions, **more)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
def test_programs_of_a_configuration_fit_into_a_multiprocessor_together(config, is_gated):
    columns, width = (2048, 1024) if is_gated else (1024, 2048)
    source = cuda_products.source_of(columns, width, 8, config, "bf16", is_gated=is_gated, is_dependent=True)
    (line,) = (line for line in source.splitlines() if line.startswith("#define SHARED_BYTES"))
    assert config.programs * (int(line.split()[2]) + 1024) <= SHARED_BYTES
    assert config.block_tokens * config.tiles <= 256
    for count in range(16, config.block_tokens + 1, 16):
        assert f"wgmma.mma_async.sync.aligned.m64n{count}k32.f32.e4m3.e4m3" in source


def test_more_tokens_of_an_expert_get_larger_items():
    blocks = [
        0 if (config := config_for(per_expert)) is None else config.block_tokens for per_expert in range(1, 200)
    ]
    assert blocks == sorted(blocks)
    assert set(blocks) == {0, *(config.block_tokens for config in CONFIGS)}


def test_sizes_that_are_no_multiples_of_tiles_are_left_to_triton():
    sizes = (256, 128), (128, 128), (256, 192), (250, 128)
    fits = [cuda_products.fits(torch.empty(2, 2 * inner, dim), CONFIGS[-1]) for dim, inner in sizes]
    assert fits == [True, False, False, False]
    layer = a_layer(21, num_experts=2, dim=48, inner=20)
    assert torch.equal(mixed(mixture_of_experts, layer, 2), mixed(triton_experts, layer, 2))


@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("num_tokens", "choices"), [(1, 2), (19, 1), (300, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_configuration_gives_what_the_definition_gives(config, num_tokens, choices, dtype):
    layer = a_layer(num_tokens, dtype=dtype)
    wanted = mixed(definition, (layer[0].float(), *layer[1:]), choices)
    found = mixed(mixture_of_experts, layer, choices, config=config)
    assert found.dtype == dtype
    assert relative_error(found, wanted) < 0.06
    assert all(torch.equal(mixed(mixture_of_experts, layer, choices, config=config), found) for _ in range(3))


@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dependent_tokens", [40, 1000])
def test_full_size_experts_are_those_of_triton(config, dependent_tokens):
    layer = a_layer(dependent_tokens, 64, 2048, 1024)
    layer[1][:, 3] += 20  # every token chooses this one
    found = mixed(mixture_of_experts, layer, 8, config=config)
    assert relative_error(found, mixed(triton_experts, layer, 8)) < 0.05


@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_padding_chooses_no_expert_and_spoils_none(config):
    layer = a_layer(200)
    positions = torch.arange(200, device=DEVICE)
    positions[::3] = -1
    layer[0][::3] = torch.nan
    found = mixed(mixture_of_experts, layer, 2, positions, config=config)
    is_there = positions >= 0
    wanted = mixed(definition, (layer[0].float().nan_to_num(), *layer[1:]), 2)
    assert relative_error(found[is_there], wanted[is_there]) < 0.06
    assert (found[~is_there] == 0).all()


@on_hopper
@pytest.mark.parametrize("num_tokens", [1, 33, 64, 65, 1001])
@pytest.mark.parametrize(("num_experts", "choices", "dim"), [(64, 8, 2048), (7, 2, 256), (33, 1, 512)])
@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("position_dtype", [None, torch.int32, torch.int64], ids=str)
def test_pairs_are_routed_as_by_triton(num_tokens, num_experts, choices, dim, logit_dtype, position_dtype):
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, dim, device=DEVICE).bfloat16()
    logits = (2 * torch.randn(num_tokens, num_experts, device=DEVICE)).round().to(logit_dtype)  # many are equal
    logits[::9] = torch.nan
    positions = None
    if position_dtype is not None:
        positions = torch.arange(num_tokens, device=DEVICE).to(position_dtype)
        positions[::5] = -1
    tokens = hidden, logits, choices, 16, positions
    found = cuda_routing.route(*tokens, is_dependent=True)
    wanted = route_by_triton(*tokens, quantises=True, is_dependent=True)
    used = wanted.items[2] > 0
    assert torch.equal(found.items[2], wanted.items[2])
    assert torch.equal(found.items[:, used], wanted.items[:, used])
    num_pairs = int(wanted.items[2].sum())
    assert torch.equal(found.pairs[:num_pairs], wanted.pairs[:num_pairs])
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)
    assert found.row_scales is not None
    assert wanted.row_scales is not None
    torch.testing.assert_close(found.row_scales, wanted.row_scales)
    assert relative_error(found.rows.float(), wanted.rows.float()) < 0.01


def test_tokens_of_other_widths_or_of_more_experts_are_routed_by_triton():
    hidden = torch.empty(3, 512, dtype=torch.bfloat16)
    assert cuda_routing.can_route(hidden, torch.empty(3, 64), 8)
    assert not cuda_routing.can_route(hidden[:, :300], torch.empty(3, 64), 8)
    assert not cuda_routing.can_route(hidden, torch.empty(3, 65), 8)
    assert not cuda_routing.can_route(hidden.float(), torch.empty(3, 64), 8)
