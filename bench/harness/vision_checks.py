"""What the fused vision side computes against what it should: kernels by their definitions, blocks by float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.device_timing import attempted
from kestrel_ops import Kernels
from kestrel_ops.library.crop_attention import crop_attention as library_crop_attention
from kestrel_ops.reference.add_layer_norm import add_layer_norm as add_layer_norm_definition
from kestrel_ops.reference.concat_gelu import concat_gelu as concat_gelu_definition
from kestrel_ops.reference.crop_attention import crop_attention as crop_attention_definition
from kestrel_ops.reference.quantise_rows import quantise_rows
from kestrel_ops.reference.scaled_linear import scaled_linear as scaled_linear_definition
from kestrel_ops.reference.scaled_linear_add import scaled_linear_add as scaled_linear_add_definition
from kestrel_ops.reference.scaled_linear_gelu import scaled_linear_gelu as scaled_linear_gelu_definition
from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from kestrel_runtime.models.moondream.vision.encoder import VisionModel

FLOAT8 = torch.float8_e4m3fn
EPSILON = 1e-5


def random_tiles(count: int, config: VisionConfig, device: torch.device) -> Tensor:
    """Blocks of colour with noise, so that patches differ as those of pictures do."""
    side = config.crop_size
    coarse = torch.rand(count, 3, side // 14, side // 14, device=device)
    even = torch.nn.functional.interpolate(coarse, size=(side, side)).permute(0, 2, 3, 1)
    return (255 * (0.8 * even + 0.2 * torch.rand_like(even))).to(torch.uint8).contiguous()


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """‖got - wanted‖ / ‖wanted‖."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check_kernels(kernels: Kernels, config: VisionConfig, device: torch.device) -> dict[str, float]:
    """Each chosen kernel against its definition, at the encoder's widths."""
    rows, dim, inner = config.num_image_tokens + 5, config.enc_dim, config.enc_ff_dim
    torch.manual_seed(2)
    hidden, delta = (torch.randn(rows, dim, device=device).bfloat16() for _ in range(2))
    wide = 2 * torch.randn(rows, inner, device=device).bfloat16()
    weight, weight_scale = quantise_rows(0.02 * torch.randn(dim, inner, device=device))
    bias = torch.randn(dim, device=device).bfloat16()
    errors: dict[str, float] = {}

    def compare(name: str, fast: Callable[[], Any], definition: Callable[[], Any]) -> None:
        with attempted(f"kernel {name}"):
            got, wanted = fast(), definition()
            got, wanted = (_dequantised(value) for value in (got, wanted))
            errors[name] = relative_error(got, wanted)
            print(f"  {name:<52}{errors[name]:.2e}", flush=True)

    for out_dtype in (torch.bfloat16, FLOAT8):
        for with_delta in (True, False):
            arguments = (delta if with_delta else None, EPSILON, out_dtype)
            compare(
                f"add_layer_norm {_name(out_dtype)}{' with delta' if with_delta else ''}",
                lambda arguments=arguments: kernels.add_layer_norm(hidden.clone(), *arguments),
                lambda arguments=arguments: add_layer_norm_definition(hidden.clone(), *arguments),
            )
        for plain, activate in ((None, True), (None, False), (hidden, True)):
            compare(
                f"concat_gelu {_name(out_dtype)} plain={plain is not None} activate={activate}",
                partial(kernels.concat_gelu, plain, wide, out_dtype, activate),
                partial(concat_gelu_definition, plain, wide, out_dtype, activate),
            )
    eight, eight_scale = quantise_rows(wide)
    for arguments in (
        (eight, eight_scale, weight, weight_scale[:, 0].contiguous(), bias, torch.bfloat16),
        (wide, None, weight.bfloat16(), None, bias, torch.bfloat16),
    ):
        compare(
            f"scaled_linear {_name(arguments[0].dtype)}",
            partial(kernels.scaled_linear, *arguments),
            partial(scaled_linear_definition, *arguments),
        )
    packed = torch.randn(2 * config.num_image_tokens, 3 * dim, device=device).bfloat16()
    for name, operation in (
        ("chosen", kernels.crop_attention),
        ("library", library_crop_attention),
    ):
        for out_scale in (None, 0.005):
            if name == "chosen" or device.type == "cuda":
                arguments = (packed, config.num_image_tokens, config.enc_n_heads, out_scale)
                compare(
                    f"crop_attention {name}{'' if out_scale is None else ' to float8'}",
                    partial(operation, *arguments),
                    partial(crop_attention_definition, *arguments),
                )
    one = torch.tensor([0.02], device=device)
    narrow = torch.randn(rows, dim, device=device).mul(50).to(FLOAT8)
    widening, _ = quantise_rows(torch.randn(inner, dim, device=device))
    inner_bias = torch.randn(inner, device=device).bfloat16()
    scales = one, one / 16
    for factor in (1.0, 30.0):
        arguments = (narrow, scales[0], widening, scales[1], inner_bias, torch.tensor([factor], device=device))
        compare(
            f"scaled_linear_gelu factor={factor}",
            partial(kernels.scaled_linear_gelu, *arguments),
            partial(scaled_linear_gelu_definition, *arguments),
        )
    compare(
        "scaled_linear with one scale",
        partial(kernels.scaled_linear, eight, one[:, None], weight, scales[1], bias, torch.bfloat16),
        partial(scaled_linear_definition, eight, one[:, None], weight, scales[1], bias, torch.bfloat16),
    )

    def added(operation: Callable[..., None]) -> Tensor:
        stream = hidden.clone()
        operation(eight, one, weight, scales[1], bias, stream)
        return stream

    compare(
        "scaled_linear_add",
        partial(added, kernels.scaled_linear_add),
        partial(added, scaled_linear_add_definition),
    )
    return errors


def _dequantised(value: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    if isinstance(value, Tensor):
        return value.float()
    rows, scale = value
    return rows.float() if scale is None else rows.float() * scale


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")


@torch.no_grad()
def check_layers(
    model: VisionModel, fused: Mapping[Any, FusedVision], device: torch.device
) -> dict[str, list[float]]:
    """Relative errors after each block, of the features and of the embeddings, against float32."""
    tiles = random_tiles(3, model.config, device)
    wanted = _plain_states(model, tiles)
    features = model.encode(tiles)
    embeddings = model.project(features, 1, 2)
    short = VisionModel(model.config).to(device).bfloat16()
    short.load_state_dict(model.state_dict())
    columns: dict[str, list[float]] = {}
    with attempted("plain bfloat16"):
        short_features = short.encode(tiles)
        columns["plain bf16"] = [
            *map(relative_error, _plain_states(short, tiles), wanted),
            relative_error(short_features, features),
            relative_error(short.project(short_features, 1, 2), embeddings),
        ]
    for precision, vision in fused.items():
        with attempted(f"layers of {precision}"):
            fused_features = vision.encode(tiles)
            columns[precision] = [
                *(
                    relative_error(got.view_as(want), want)
                    for got, want in zip(vision.states(tiles), wanted, strict=True)
                ),
                relative_error(fused_features, features),
                relative_error(vision.project_all([fused_features], [(1, 2)])[0], embeddings),
            ]
    names = [*(f"block {layer}" for layer in range(len(wanted))), "features", "embeddings"]
    print(f"\nRelative error against float32\n  {'':<12}" + "".join(f"{name:>14}" for name in columns))
    for place, name in enumerate(names):
        print(f"  {name:<12}" + "".join(f"{errors[place]:>14.2e}" for errors in columns.values()), flush=True)
    return columns


def _plain_states(model: VisionModel, tiles: Tensor) -> list[Tensor]:
    state = model.patch_emb(model._patches(tiles)) + model.pos_emb
    states = []
    for block in model.blocks:
        state = block(state)
        states.append(state)
    return states
