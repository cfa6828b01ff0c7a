"""What does it cost to put several prompts into the cache, part by part, beside what the device reaches?

Full-size random weights; every prompt has an image and a question (746 tokens, 730 of them prefix). Every part is
timed alone at the sizes it has in the decoder, then the whole; a part's limit is the larger of its operations over
the rate of a large product in the same type and its bytes over the rate of a copy, both measured in the same run.
Before that, every kernel is compared with its definition. `--check` compares each block's output with the plain
decoder in float32, beside what the plain decoder in bfloat16 makes of it; `--tune` times the attention over other
tilings; `--experts` times the mixture of experts of a Moondream 3.
"""

import copy
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.harness.output import parser_of, write_json
from bench.harness.prefill_inputs import (
    FLOAT8,
    PagedAttention,
    Prompts,
    new_cache,
    quantised_experts,
    random_experts,
    random_text,
)
from bench.harness.timing import Limits, Part, PartTimer, attempted, launch_us, measure_limits, time_us
from kestrel_ops import Kernels
from kestrel_ops.attention.reference import prefill_attention as attention_definition
from kestrel_ops.attention.reference import rotary_write_kv as rotary_definition
from kestrel_ops.attention.triton_prefill_attention import Tiling
from kestrel_ops.experts.reference import mixture_of_experts as mixture_definition
from kestrel_runtime.api.options import parse_kernels
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.fused.prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused.weights import FusedBlock, fused_blocks, prompt_blocks
from kestrel_runtime.models.moondream.text.decoder import TextModel, rotary_tables
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2, MOONDREAM_3

Precision = Literal["model", "float8"]
TINY = replace(
    MOONDREAM_2.text, dim=64, ff_dim=128, n_layers=3, n_heads=4, n_kv_heads=4, vocab_size=64, max_context=128
)
TILINGS = (
    Tiling(64, 64, 4, 2, 128),
    Tiling(64, 64, 4, 3),
    Tiling(64, 64, 4, 3, 128),
    Tiling(64, 64, 4, 4, 128),
    Tiling(64, 128, 4, 2, 168),
    Tiling(64, 128, 4, 2),
    Tiling(128, 64, 4, 3),
    Tiling(128, 64, 8, 2, 128),
    Tiling(128, 64, 8, 3),
    Tiling(128, 64, 8, 3, 128),
    Tiling(128, 64, 8, 4, 128),
    Tiling(128, 128, 8, 2, 128),
    Tiling(128, 128, 8, 2),
)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """‖got - wanted‖ / ‖wanted‖."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


# Correctness


def check_kernels(kernels: Kernels, config: TextConfig, prompts: Prompts, device: torch.device) -> dict[str, float]:
    """Each chosen kernel against its definition, at the decoder's widths."""
    errors: dict[str, float] = {}

    def compare(name: str, fast: Callable[[], Tensor], definition: Callable[[], Tensor]) -> None:
        with attempted(f"kernel {name}"):
            errors[name] = relative_error(fast(), definition())
            print(f"  {name:<52}{errors[name]:.2e}", flush=True)

    starts = {"whole prompts": 0, "behind the prefix": prompts.prefix_length, "last rows": prompts.num_tokens - 1}
    for page_dtype in (torch.bfloat16, FLOAT8):
        pages = "float8" if page_dtype == FLOAT8 else "bfloat16"
        for what, start in starts.items():
            inputs = PagedAttention(config, prompts, device, page_dtype, start)
            compare(
                f"prefill_attention {what}, {pages} pages",
                partial(inputs.attend, kernels.prefill_attention),
                partial(inputs.attend, attention_definition),
            )

        def written(operation: Callable[..., Any], page_dtype: torch.dtype = page_dtype) -> Tensor:
            torch.manual_seed(3)
            inputs = PagedAttention(config, prompts, device, page_dtype)
            inputs.write(operation)
            return inputs.everything()

        compare(
            f"rotary_write_kv {pages} pages",
            partial(written, kernels.rotary_write_kv),
            partial(written, rotary_definition),
        )
    experts = random_experts(4, 8, config.dim, max(16, config.dim // 2), device)
    compare(
        "mixture_of_experts bfloat16",
        partial(kernels.mixture_of_experts, *experts, 2),
        partial(mixture_definition, *experts, 2),
    )
    eight = quantised_experts(*experts)
    compare(
        "mixture_of_experts float8",
        partial(kernels.mixture_of_experts, *eight[:4], 2, *eight[4:]),
        partial(mixture_definition, *eight[:4], 2, *eight[4:]),
    )
    return errors


@torch.no_grad()
def check_layers(
    short: TextModel,
    blocks: Mapping[Precision, tuple[FusedBlock, ...]],
    kernels: Kernels,
    prompts: Prompts,
    device: torch.device,
) -> dict[str, list[float]]:
    """Relative errors after each block against the plain decoder in float32; last rows and logits at the end."""
    config = short.config
    plan = prompts.plan(device)
    embeddings = torch.randn(prompts.num_rows, config.dim, device=device).bfloat16()
    last = plan.query_starts[1:].long() - 1
    exact = copy.deepcopy(short).float()
    wanted = _plain_states(
        exact, embeddings.float(), plan, new_cache(config, prompts.num_pages(), device, torch.float32)
    )
    wanted_logits = exact.logits(wanted[-1][last])
    columns: dict[str, list[float]] = {}
    with attempted("plain bfloat16"):
        states = _plain_states(
            short, embeddings, plan, new_cache(config, prompts.num_pages(), device, torch.bfloat16)
        )
        columns["plain bf16"] = [
            *map(relative_error, states, wanted),
            relative_error(states[-1][last], wanted[-1][last]),
            relative_error(short.logits(states[-1][last]), wanted_logits),
        ]
    for precision, own in blocks.items():
        for cache_dtype in (torch.bfloat16, FLOAT8) if precision == "float8" else (torch.bfloat16,):
            name = precision + (", fp8 cache" if cache_dtype == FLOAT8 else "")
            with attempted(f"layers of {name}"):
                cache = new_cache(config, prompts.num_pages(), device, cache_dtype)
                states = [
                    FusedPrefill(short, own[: layer + 1], kernels).forward(embeddings, plan, cache)
                    for layer in range(config.n_layers)
                ]
                ends = FusedPrefill(short, own, kernels).forward(embeddings, plan, cache, last)
                columns[name] = [
                    *map(relative_error, states, wanted),
                    relative_error(ends, wanted[-1][last]),
                    relative_error(short.logits(ends.to(embeddings.dtype)), wanted_logits),
                ]
    names = [*(f"block {layer}" for layer in range(len(wanted))), "last rows", "logits"]
    print(f"\nRelative error against float32\n  {'':<12}" + "".join(f"{name:>20}" for name in columns))
    for place, name in enumerate(names):
        print(f"  {name:<12}" + "".join(f"{errors[place]:>20.2e}" for errors in columns.values()), flush=True)
    return columns


def _plain_states(model: TextModel, embeddings: Tensor, plan: PackedChunks, cache: KVCache) -> list[Tensor]:
    config = model.config
    tables = rotary_tables(config.rotary_dim, config.max_context, config.rope_theta, embeddings.device)
    cosine, sine = (table[plan.positions] for table in tables)
    attend_plain, state, states = cache.prefill(plan), embeddings, []
    for layer, block in enumerate(model.blocks):
        state = block(state, plan.positions, cosine, sine, attend_plain, layer, None)
        states.append(state)
    return states


# Time


def time_parts(
    kernels: Kernels,
    config: TextConfig,
    prompts: Prompts,
    precision: Precision,
    limits: Limits,
    device: torch.device,
) -> list[Part]:
    """Every launch of the decoder's blocks alone."""
    rows, dim, qkv_dim, inner = prompts.num_rows, config.dim, config.qkv_dim, config.ff_dim
    width, layers = config.n_heads * config.head_dim, config.n_layers
    dtype = FLOAT8 if precision == "float8" else torch.bfloat16
    element = dtype.itemsize
    of = f"{precision}, {prompts.count} prompts"
    timer = PartTimer(device, limits, precision, of, shares=prompts.count, share=" a prompt")
    timer.time_product("up", kernels.scaled_linear, rows, qkv_dim + inner, dim, calls=layers)
    timer.time_product("down", kernels.scaled_linear, rows, dim, width + inner, calls=layers)

    def short(columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device).bfloat16()

    timer.time(
        "add_layer_norm",
        kernels.add_layer_norm,
        lambda: (torch.randn(rows, dim, device=device), short(dim), 1e-5, dtype),
        calls=layers,
        size=rows * dim * (4 + 4 + 2 + element),
    )
    timer.time(
        "concat_gelu",
        kernels.concat_gelu,
        lambda: (short(width), short(qkv_dim + inner)[:, qkv_dim:], dtype),
        calls=layers,
        size=rows * (width + inner) * (2 + element),
    )
    for page_dtype in (torch.bfloat16, FLOAT8):
        suffix = ", fp8 pages" if page_dtype == FLOAT8 else ""
        is_whole = (page_dtype == FLOAT8) == (dtype == FLOAT8)  # which of the two the sum counts
        turned = (
            rows * config.head_dim * (config.n_heads + config.n_kv_heads) * 2
        )  # half of the dimensions, read and written
        copied = rows * config.n_kv_heads * config.head_dim * (3 + 2 * page_dtype.itemsize)
        timer.time(
            f"rotary_write_kv{suffix}",
            lambda inputs: inputs.write(kernels.rotary_write_kv),
            lambda page_dtype=page_dtype: (PagedAttention(config, prompts, device, page_dtype),),
            calls=layers if is_whole else 0,
            size=turned + copied,
        )
    timer.time(
        "attention",
        lambda inputs: inputs.attend(kernels.prefill_attention),
        lambda: (PagedAttention(config, prompts, device, torch.bfloat16),),
        calls=layers,
        flops=4.0 * prompts.num_scores() * config.n_heads * config.head_dim,
        size=2 * rows * (qkv_dim + width),
    )
    for what, start in (("behind the prefix", prompts.prefix_length), ("last rows", prompts.num_tokens - 1)):
        count = prompts.count * (prompts.num_tokens - start)
        timer.time(
            f"attention {what}",
            lambda inputs: inputs.attend(kernels.prefill_attention),
            lambda start=start: (PagedAttention(config, prompts, device, dtype, start),),
            calls=0,
            flops=4.0 * count * prompts.num_tokens * config.n_heads * config.head_dim,
            size=2 * rows * config.n_kv_heads * config.head_dim * element,
        )
    timer.time(
        "torch's attention, no mask",
        scaled_dot_product_attention,
        lambda: tuple(
            torch.randn(
                prompts.count, config.n_heads, prompts.num_tokens, config.head_dim, device=device
            ).bfloat16()
            for _ in range(3)
        ),
        calls=0,
        flops=4.0 * prompts.count * prompts.num_tokens**2 * config.n_heads * config.head_dim,
        size=2 * 4 * rows * width,
    )
    return timer.parts


@torch.no_grad()
def time_whole(
    text: TextModel, blocks: tuple[FusedBlock, ...], kernels: Kernels, prompts: Prompts, cache_dtype: torch.dtype
) -> dict[str, float]:
    """The blocks as they run, last rows alone at the end, and what the host spends to launch them."""
    device = text.wte.device
    plan = prompts.plan(device)
    cache = new_cache(text.config, prompts.num_pages(), device, cache_dtype)
    embeddings = torch.randn(prompts.num_rows, text.config.dim, device=device).bfloat16()
    last = plan.query_starts[1:].long() - 1
    call = partial(FusedPrefill(text, blocks, kernels).forward, embeddings, plan, cache, last)
    return {"us": time_us([call], replays=5, rounds=1), "launch_us": launch_us(call)}


def time_experts(kernels: Kernels, limits: Limits, device: torch.device) -> dict[str, dict[str, float]]:
    """One layer's mixture, by precision and number of tokens, captured in a graph as a decode step does."""
    moe = MOONDREAM_3.text.moe
    assert moe is not None
    choices, table = moe.experts_per_token, {}
    print(f"\nMixture of experts, {moe.num_experts} of {moe.expert_inner_dim}, one layer")
    for precision in ("model", "float8"):
        for num_tokens in (1, 4, 16, 64, 746, 2984):
            with attempted(f"experts of {num_tokens} tokens, {precision}"), torch.no_grad():
                values = random_experts(
                    num_tokens, moe.num_experts, MOONDREAM_3.text.dim, moe.expert_inner_dim, device
                )
                values = quantised_experts(*values) if precision == "float8" else values
                us = time_us([partial(kernels.mixture_of_experts, *values[:4], choices, *values[4:])], replays=5)
                num_used = len(values[1].topk(choices).indices.unique())
                size = num_used * 3 * values[2].shape[2] * moe.expert_inner_dim * values[2].element_size()
                flops = 6.0 * num_tokens * choices * values[2].shape[2] * moe.expert_inner_dim
                limit = max(size / limits.copy_bytes_per_s, flops / limits.product_flops_per_s[precision]) * 1e6
                table[f"{precision} {num_tokens}"] = {"us": us, "limit_us": limit}
                print(f"  {precision:<8}{num_tokens:>6} tokens{us:>10.1f} us   limit {limit:>8.1f} us", flush=True)
    return table


def tune(
    config: TextConfig, counts: list[int], prompts: Prompts, device: torch.device
) -> dict[str, dict[str, float]]:
    """The attention over candidate tilings: times in microseconds by number of prompts and tiling."""
    table: dict[str, dict[str, float]] = {}
    for count in counts:
        sets = [PagedAttention(config, replace(prompts, count=count), device, torch.bfloat16) for _ in range(2)]
        times = table.setdefault(f"{count} prompts", {})
        for tiles in TILINGS:
            name = f"{tiles.queries}x{tiles.keys} w{tiles.num_warps} s{tiles.num_stages} r{tiles.max_registers}"
            with attempted(f"attention {name}"):
                times[name] = time_us([partial(inputs.attend_tiled, tiles) for inputs in sets])
        line = "  ".join(f"{name} {us:.1f}" for name, us in sorted(times.items(), key=lambda item: item[1]))
        print(f"  {count} prompts, us, best first: {line}", flush=True)
    return table


def main() -> int:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--parts", type=int, nargs="*", default=[1, 8], help="numbers of prompts to take apart")
    parser.add_argument("--precision", nargs="+", choices=["model", "float8"], default=["model", "float8"])
    parser.add_argument("--kernels", type=parse_kernels, default=(), help="operation=implementation,…")
    parser.add_argument("--check", action="store_true", help="compare with float32 block by block")
    parser.add_argument("--tune", action="store_true", help="time the attention over tilings")
    parser.add_argument("--experts", action="store_true", help="time the mixture of experts of a Moondream 3")
    parser.add_argument("--tiny", action="store_true", help="a few thousand weights, to see that it runs")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = TINY if arguments.tiny else MOONDREAM_2.text
    prompts = Prompts(2, 40, 26) if arguments.tiny else Prompts(2, 746, 730)
    started = time.perf_counter()

    limits = measure_limits(device)
    print(f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s, products", end="")
    print("".join(f"  {name} {rate / 1e12:.0f} TFLOP/s" for name, rate in limits.product_flops_per_s.items()))
    kernels = Kernels.select(device.type, dict(arguments.kernels))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "limits": asdict(limits)}
    result["kernels"] = {field.name: getattr(kernels, field.name).__module__ for field in fields(kernels)}

    print("\nKernels against their definitions, relative error")
    result["kernel_errors"] = check_kernels(kernels, config, prompts, device)
    text = random_text(config, device)
    blocks: dict[Precision, tuple[FusedBlock, ...]] = {}
    for precision in arguments.precision:
        with attempted(f"building {precision}"):
            blocks[precision] = prompt_blocks(text, fused_blocks(text, precision))
    if arguments.check:
        with attempted("the check against float32"):
            result["layer_errors"] = check_layers(text, blocks, kernels, prompts, device)
    if arguments.tune and device.type == "cuda":
        print("\nAttention: queries x keys, warps, stages, registers")
        result["tuning"] = tune(config, [1, 8], prompts, device)
    if arguments.experts:
        result["experts"] = time_experts(kernels, limits, device)
    result["parts"], result["whole"] = {}, {}
    for precision in blocks:
        for count in arguments.parts:
            print(f"\n{count} prompts of {prompts.num_tokens}, {precision}: parts")
            parts = time_parts(kernels, config, replace(prompts, count=count), precision, limits, device)
            result["parts"][f"{precision} {count}"] = [asdict(part) for part in parts]
            total = sum(part.us * part.calls for part in parts) / 1e3 / count
            limit = sum(part.limit_us * part.calls for part in parts) / 1e3 / count
            print(f"  {'sum':<28}{total:>25.3f} ms a prompt   limit {limit:.3f} ms")
    print(f"\n{'prompts':>7} {'precision':<22}{'ms':>9}{'ms a prompt':>13}{'launching ms':>14}")
    for precision, own in blocks.items():
        for cache_dtype in (torch.bfloat16, FLOAT8) if precision == "float8" else (torch.bfloat16,):
            name = precision + (", fp8 cache" if cache_dtype == FLOAT8 else "")
            for count in arguments.prompts:
                with attempted(f"{count} prompts in {name}"):
                    whole = time_whole(text, own, kernels, replace(prompts, count=count), cache_dtype)
                    result["whole"][f"{name} {count}"] = whole
                    milliseconds = whole["us"] / 1e3
                    print(
                        f"{count:>7} {name:<22}{milliseconds:>9.2f}{milliseconds / count:>13.3f}"
                        f"{whole['launch_us'] / 1e3:>14.2f}",
                        flush=True,
                    )
    result["seconds"] = time.perf_counter() - started
    folder = Path(os.environ.get("OUT", "bench/out"))
    write_json(folder / "prefill.json", result)
    print(f"\n{result['seconds']:.0f} s, {folder / 'prefill.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
