"""What does it cost to encode and project the crops of several images, part by part, beside the limits?

Full-size random weights. Every part is timed alone at the sizes it has in the encoder, then the whole; the limit of
a part is the larger of its operations over the rate of a large product in the same type and its bytes over the rate
of a copy, both measured in the same run. `--check` compares each block's output with the plain encoder in float32,
beside what the plain encoder in bfloat16 makes of it; `--tune` times the row kernels over candidate block sizes.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.harness.output import parser_of, write_json
from bench.harness.timing import (
    NUM_INPUT_SETS,
    Limits,
    Part,
    PartTimer,
    attempted,
    launch_us,
    measure_limits,
    random_linear,
    time_us,
)
from kestrel_ops import Kernels
from kestrel_ops.attention.library_crop_attention import crop_attention as library_crop_attention
from kestrel_ops.attention.reference import crop_attention as crop_attention_definition
from kestrel_ops.dispatch import implementation_of
from kestrel_ops.linear.reference import scaled_linear as scaled_linear_definition
from kestrel_ops.linear.reference import scaled_linear_add as scaled_linear_add_definition
from kestrel_ops.linear.reference import scaled_linear_gelu as scaled_linear_gelu_definition
from kestrel_ops.norms.reference import add_layer_norm as add_layer_norm_definition
from kestrel_ops.norms.reference import concat_gelu as concat_gelu_definition
from kestrel_ops.norms.reference import quantise_rows
from kestrel_ops.norms.triton_add_layer_norm import add_layer_norm as triton_add_layer_norm
from kestrel_ops.norms.triton_concat_gelu import concat_gelu as triton_concat_gelu
from kestrel_ops.norms.triton_rows import RowBlocks
from kestrel_runtime.api.options import parse_kernels
from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.fused.calibrated_vision import CalibratedVision
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from kestrel_runtime.models.moondream.vision.encoder import VisionModel
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2

FLOAT8 = torch.float8_e4m3fn
EPSILON = 1e-5


def random_crops(count: int, config: VisionConfig, device: torch.device) -> Tensor:
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
    for name, operation in (("chosen", kernels.crop_attention), ("library", library_crop_attention)):
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
        "scaled_linear_add", partial(added, kernels.scaled_linear_add), partial(added, scaled_linear_add_definition)
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
    crops = random_crops(3, model.config, device)
    wanted = _plain_states(model, crops)
    features = model.encode(crops)
    embeddings = model.project(features, 1, 2)
    short = VisionModel(model.config).to(device).bfloat16()
    short.load_state_dict(model.state_dict())
    columns: dict[str, list[float]] = {}
    with attempted("plain bfloat16"):
        short_features = short.encode(crops)
        columns["plain bf16"] = [
            *map(relative_error, _plain_states(short, crops), wanted),
            relative_error(short_features, features),
            relative_error(short.project(short_features, 1, 2), embeddings),
        ]
    for precision, vision in fused.items():
        with attempted(f"layers of {precision}"):
            fused_features = vision.encode(crops)
            columns[precision] = [
                *(
                    relative_error(got.view_as(want), want)
                    for got, want in zip(vision.states(crops), wanted, strict=True)
                ),
                relative_error(fused_features, features),
                relative_error(vision.project_all([fused_features], [(1, 2)])[0], embeddings),
            ]
    names = [*(f"block {layer}" for layer in range(len(wanted))), "features", "embeddings"]
    print(f"\nRelative error against float32\n  {'':<12}" + "".join(f"{name:>14}" for name in columns))
    for place, name in enumerate(names):
        print(f"  {name:<12}" + "".join(f"{errors[place]:>14.2e}" for errors in columns.values()), flush=True)
    return columns


def _plain_states(model: VisionModel, crops: Tensor) -> list[Tensor]:
    state = model.patch_emb(model._patches(crops)) + model.pos_emb
    states = []
    for block in model.blocks:
        state = block(state)
        states.append(state)
    return states


Precision = Literal["model", "float8", "calibrated"]
FLOAT8 = torch.float8_e4m3fn
EPSILON = 1e-5
PRECISIONS = ("model", "float8", "calibrated")
CROPS_OF_AN_IMAGE, GRID = 9, (2, 4)
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ROW_CANDIDATES = [
    RowBlocks(rows, num_warps)
    for rows, num_warps in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8))
]
_MOST_VALUES_OF_A_WARP = 4096  # more do not stay in registers
TINY = replace(
    MOONDREAM_2.vision,
    enc_dim=32,
    enc_n_heads=2,
    enc_n_layers=2,
    enc_ff_dim=48,
    proj_inner_dim=64,
    proj_out_dim=16,
    crop_size=56,
    overlap_margin=1,
)


def random_vision(config: VisionConfig, device: torch.device) -> VisionModel:
    """A float32 encoder of random weights whose norms do something."""
    torch.manual_seed(1)
    with torch.device(device):
        model = VisionModel(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_gain = isinstance(module, torch.nn.LayerNorm) and name == "weight"
            parameter.data.normal_(1.0 if is_gain else 0.0, 0.2 if is_gain else 0.02)
    return model.eval().requires_grad_(False)


def time_parts(
    kernels: Kernels,
    config: VisionConfig,
    num_crops: int,
    precision: Precision,
    limits: Limits,
    device: torch.device,
) -> list[Part]:
    """Every launch of the encoder's blocks alone."""
    rows, dim, inner = num_crops * config.num_image_tokens, config.enc_dim, config.enc_ff_dim
    heads, layers = config.enc_n_heads, config.enc_n_layers
    dtype = torch.bfloat16 if precision == "model" else FLOAT8
    # Scales that are known need not be measured.
    known: dict[str, Any] = {"out_scale": 0.05} if precision == "calibrated" else {}
    of = f"{precision}, {num_crops} crops"
    timer = PartTimer(device, limits, "model" if precision == "model" else "float8", of)

    def whole_product(name: str, operation: Callable[..., Any], out_dim: int, in_dim: int) -> None:
        # A product that applies the GELU, or adds to the stream, itself.
        weight, _, bias = random_linear(out_dim, in_dim, "model" if precision == "model" else "float8", device)
        one = None if precision == "model" else torch.full((1,), 0.01, device=device)

        def inputs() -> tuple[Any, ...]:
            x = torch.randn(rows, in_dim, device=device)
            x = x.bfloat16() if one is None else x.mul(50).to(FLOAT8)
            if operation is kernels.scaled_linear_gelu:
                return x, one, weight, one, bias, one
            if operation is kernels.scaled_linear_add:
                return x, one, weight, one, bias, torch.zeros(rows, out_dim, device=device, dtype=torch.bfloat16)
            return x, None if one is None else one[:, None], weight, one, bias, torch.bfloat16

        out_bytes = {kernels.scaled_linear_gelu: dtype.itemsize, kernels.scaled_linear_add: 4}.get(operation, 2)
        size = dtype.itemsize * in_dim * (rows + out_dim) + out_bytes * rows * out_dim
        flops = 2.0 * rows * in_dim * out_dim
        timer.time(f"product {name}", operation, inputs, calls=layers, flops=flops, size=size)

    if precision != "float8":
        whole_product("qkv", kernels.scaled_linear, 3 * dim, dim)
        whole_product("proj, added", kernels.scaled_linear_add, dim, dim)
        whole_product("fc1, activated", kernels.scaled_linear_gelu, inner, dim)
        whole_product("fc2, added", kernels.scaled_linear_add, dim, inner)
    else:
        for name, out_dim, in_dim in (
            ("qkv", 3 * dim, dim),
            ("proj", dim, dim),
            ("fc1", inner, dim),
            ("fc2", dim, inner),
        ):
            timer.time_product(name, kernels.scaled_linear, rows, out_dim, in_dim, calls=layers)

    def short(width: int) -> Tensor:
        return torch.randn(rows, width, device=device).bfloat16()

    out_size = 1 if dtype == FLOAT8 else 2
    timer.time(
        "add_layer_norm",
        partial(kernels.add_layer_norm, **known),
        lambda: (short(dim), short(dim) if precision == "float8" else None, EPSILON, dtype),
        calls=2 * layers,
        size=rows * dim * ((6 if precision == "float8" else 2) + out_size),
    )
    if precision == "float8":
        timer.time(
            "gelu",
            kernels.concat_gelu,
            lambda: (None, short(inner), dtype),
            calls=layers,
            size=rows * inner * (2 + out_size),
        )
        timer.time(
            "quantise attended",
            kernels.concat_gelu,
            lambda: (None, short(dim), dtype, False),
            calls=layers,
            size=rows * dim * 3,
        )

    def attention(name: str, operation: Callable[..., Any], backend: SDPBackend | None) -> None:
        rounded = known.get("out_scale")
        is_chosen = operation is kernels.crop_attention
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            timer.time(
                f"attention {name}{', chosen' if is_chosen else ''}",
                operation,
                lambda: (short(3 * dim), config.num_image_tokens, heads, rounded if backend is None else None),
                calls=layers if is_chosen else 0,
                flops=4.0 * num_crops * config.num_image_tokens**2 * dim,
                size=rows * dim * 8,
            )

    attention("by " + implementation_of(kernels.crop_attention), kernels.crop_attention, None)
    if device.type == "cuda":
        if kernels.crop_attention is not library_crop_attention:
            attention("by library", library_crop_attention, None)
        for name, backend in BACKENDS.items():
            attention(f"by {name}", _attend, backend)
    return timer.parts


def _attend(packed: Tensor, num_patches: int, heads: int, _: float | None) -> Tensor:
    query, key, value = packed.view(-1, num_patches, 3, heads, packed.shape[1] // (3 * heads)).permute(
        2, 0, 3, 1, 4
    )
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(len(packed), -1)


@torch.no_grad()
def time_whole(vision: FusedVision, num_crops: int, device: torch.device) -> dict[str, float]:
    """Encoder and projection as they run, and what the host spends to launch them."""
    crops = random_crops(num_crops, vision.config, device)
    num_images = max(1, num_crops // CROPS_OF_AN_IMAGE)
    shape = (CROPS_OF_AN_IMAGE, vision.config.num_image_tokens, vision.config.enc_dim)
    features = [torch.randn(shape, device=device).bfloat16() for _ in range(num_images)]
    project = partial(vision.project_all, features, [GRID] * num_images)
    encode = partial(vision.encode, crops)
    whole = {
        "num_images": num_images,
        "encode_launch_us": launch_us(encode),
        "project_launch_us": launch_us(project),
    }
    whole |= {"encode_us": math.nan, "project_us": math.nan}
    with attempted(f"timing the encoding of {num_crops} crops"):
        whole["encode_us"] = time_us([encode], replays=5, rounds=1)
    with attempted(f"timing the projection of {num_images} images"):
        whole["project_us"] = time_us([project])
    return whole


def tune(num_rows: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Row kernels over candidate blocks: times in microseconds by case and candidate."""
    table: dict[str, dict[str, float]] = {}

    def case(
        name: str,
        function: Callable[..., Any],
        inputs: Callable[[], tuple[Any, ...]],
        candidates: Sequence[RowBlocks] = ROW_CANDIDATES,
    ) -> None:
        times = table[name] = {}
        sets = [inputs() for _ in range(NUM_INPUT_SETS)]
        width = sum(value.shape[1] for value in sets[0] if isinstance(value, Tensor))
        for blocks in candidates:
            if isinstance(blocks, RowBlocks) and blocks.rows * width > _MOST_VALUES_OF_A_WARP * blocks.num_warps:
                continue
            with attempted(f"{name} with {blocks}"):
                label = "x".join(map(str, asdict(blocks).values()))
                times[label] = time_us([partial(function, *values, blocks=blocks) for values in sets])
        chosen = time_us([partial(function, *values) for values in sets])
        best = min(times, key=lambda candidate: times[candidate])
        line = "  ".join(f"{candidate} {us:.1f}" for candidate, us in times.items())
        print(f"  {name:<26} best {best} {times[best]:.1f} us, chosen {chosen:.1f} us | {line}", flush=True)

    def short(width: int) -> Tensor:
        return torch.randn(num_rows, width, device=device).bfloat16()

    print(f"\nBlocks (rows x warps), {num_rows} rows, float8 out")
    for width in (1152, 2048):
        case(
            f"add_layer_norm {width}",
            triton_add_layer_norm,
            lambda width=width: (short(width), short(width), EPSILON, FLOAT8),
        )
    for plain, width, activate in ((0, 1152, False), (0, 4304, True), (0, 8192, True), (2048, 8192, True)):
        case(
            f"concat_gelu {plain}+{width}{'' if activate else ' plain'}",
            triton_concat_gelu,
            lambda plain=plain, width=width, activate=activate: (
                short(plain) if plain else None,
                short(width),
                FLOAT8,
                activate,
            ),
        )
    return table


def main() -> int:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--crops", type=int, nargs="+", default=[9, 18, 27, 36])
    parser.add_argument("--parts", type=int, nargs="*", default=[9, 36], help="crop counts to take apart")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--kernels", type=parse_kernels, default=(), help="operation=implementation,…")
    parser.add_argument("--check", action="store_true", help="compare with float32 block by block")
    parser.add_argument("--tune", action="store_true", help="time row kernels over block sizes")
    parser.add_argument("--tiny", action="store_true", help="a few thousand weights, to see that it runs")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = TINY if arguments.tiny else MOONDREAM_2.vision
    started = time.perf_counter()

    limits = measure_limits(device)
    print(f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s, products", end="")
    print("".join(f"  {name} {rate / 1e12:.0f} TFLOP/s" for name, rate in limits.product_flops_per_s.items()))
    kernels = Kernels.select(device.type, dict(arguments.kernels))
    result: dict[str, Any] = {"device": _device_name(device), "torch": torch.__version__, "limits": asdict(limits)}
    result["kernels"] = {field.name: getattr(kernels, field.name).__module__ for field in fields(kernels)}

    print("\nKernels against their definitions, relative error")
    result["kernel_errors"] = check_kernels(kernels, config, device)
    exact = random_vision(config, device)
    short = VisionModel(config).to(device).bfloat16()
    short.load_state_dict(exact.state_dict())
    fused: dict[Precision, FusedVision] = {}
    for precision in arguments.precision:
        with attempted(f"building {precision}"):
            if precision == "calibrated":
                fused[precision] = CalibratedVision(short, kernels, random_crops(3, config, device))
            else:
                fused[precision] = FusedVision(short, kernels, precision)
    if arguments.check:
        result["layer_errors"] = check_layers(exact, fused, device)
    if arguments.tune and device.type == "cuda":
        result["tuning"] = tune(36 * config.num_image_tokens, device)
    result["parts"], result["whole"] = {}, {}
    for precision in fused:
        for num_crops in arguments.parts:
            print(f"\n{num_crops} crops, {precision}: parts")
            parts = time_parts(kernels, config, num_crops, precision, limits, device)
            result["parts"][f"{precision} {num_crops}"] = [asdict(part) for part in parts]
            print(f"  {'sum':<28}{sum(part.us * part.calls for part in parts) / 1e3:>28.2f} ms")
    print(f"\n{'crops':>5} {'precision':<10}{'encode ms':>10}{'project ms':>11}{'image ms':>10}{'launch ms':>11}")
    for precision, vision in fused.items():
        for num_crops in arguments.crops:
            with attempted(f"encoding {num_crops} crops in {precision}"):
                whole = time_whole(vision, num_crops, device)
                result["whole"][f"{precision} {num_crops}"] = whole
                encode_ms, project_ms = whole["encode_us"] / 1e3, whole["project_us"] / 1e3
                image_ms = encode_ms / num_crops * CROPS_OF_AN_IMAGE + project_ms / whole["num_images"]
                launch_ms = (whole["encode_launch_us"] + whole["project_launch_us"]) / 1e3
                line = f"{encode_ms:>10.2f}{project_ms:>11.3f}{image_ms:>10.2f}{launch_ms:>11.2f}"
                print(f"{num_crops:>5} {precision:<10}{line}", flush=True)
    result["seconds"] = time.perf_counter() - started
    folder = Path(os.environ.get("OUT", "bench/out"))
    write_json(folder / "vision.json", result)
    print(f"\n{result['seconds']:.0f} s, {folder / 'vision.json'}")
    return 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
