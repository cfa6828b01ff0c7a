"""How long does one step take that gives every sequence its next token, and where does the time go?

Full-size random weights of a Moondream 2. The whole step (blocks, head, the largest logit) and every operation in
it are captured in graphs; limits are the bytes that must be read over the rate of a copy, measured in the same run.
Before that, every kernel is compared with its definition. `--check` compares keys and values of every layer and the
logits with the plain decoder in float32; `--tune` times the kernels over other cuts, compiled by many processes at
once.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bench.harness.decode_steps import (
    FLOAT8,
    OPERATIONS,
    AttentionInputs,
    Contexts,
    Model,
    Precision,
    dequantised,
    time_contexts,
    time_steps,
)
from bench.harness.output import parser_of, write_json
from bench.harness.prefill_inputs import random_text, random_text_with_experts
from bench.harness.timing import Limits, attempted, measure_limits, time_us
from kestrel_ops import Kernels, reference
from kestrel_ops.attention.triton_rotary_decode_attention import AttentionConfig
from kestrel_ops.dispatch import function_of
from kestrel_ops.linear.triton_single_token import SingleTokenConfig
from kestrel_ops.linear.triton_small_batch import SmallBatchConfig
from kestrel_runtime.api.options import parse_kernels
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.config import MoeConfig
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.text.decoder import TextModel
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2, MOONDREAM_3

_FLOAT8 = torch.float8_e4m3fn
_LONG = (746, 1002)


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to run one kernel in one case."""

    operation: str
    precision: Literal["model", "float8"]
    batch: int
    launch_config: SmallBatchConfig | SingleTokenConfig | AttentionConfig
    dtype: torch.dtype = torch.bfloat16
    """The cache's type, for attention."""
    contexts: tuple[int, int] = (0, 0)
    num_parts: int = 1

    def case(self) -> str:
        """What is done, by any cut."""
        if isinstance(self.launch_config, AttentionConfig):
            return (
                f"{self.operation} {str(self.dtype)[6:]} {self.contexts[0]}..{self.contexts[1]} batch {self.batch}"
            )
        return f"{self.operation} {self.precision} batch {self.batch}"

    def name(self) -> str:
        """How this one does it."""
        own = self.launch_config
        if isinstance(own, AttentionConfig):
            way = " in steps" if own.in_steps else ""
            return f"tile {own.tile} warps {own.num_warps} stages {own.num_stages} parts {self.num_parts}{way}"
        if isinstance(own, SingleTokenConfig):
            return f"n {own.block_n} warps {own.num_warps} bytes {own.tile_bytes} in registers"
        return (
            f"n {own.block_n} k {own.block_k} warps {own.num_warps} stages {own.num_stages} splits {own.num_splits}"
        )


def _products() -> Iterator[Cut]:
    shapes: dict[Literal["model", "float8"], tuple[tuple[int, int, int, int], ...]] = {
        "float8": (
            (32, 128, 4, 4),
            (32, 256, 4, 4),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (64, 128, 4, 5),
            (64, 256, 4, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 3),
            (128, 128, 4, 3),
        ),
        "model": (
            (32, 128, 4, 4),
            (64, 64, 4, 4),
            (64, 64, 4, 6),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (128, 64, 8, 4),
            (128, 64, 4, 4),
        ),
    }
    for precision in shapes:
        for block_n, warps in ((2, 4), (4, 4), (4, 8), (8, 4), (8, 8), (16, 4), (16, 8)):
            launch_config = SingleTokenConfig(block_n, warps)
            yield Cut("decode_expand", precision, 1, launch_config)
            for tile_bytes in (1024, 2048):
                yield Cut("decode_contract", precision, 1, replace(launch_config, tile_bytes=tile_bytes))
    for precision, cuts in shapes.items():
        for batch in (1, 16, 64, 128):
            for block_n, block_k, warps, stages in cuts:
                yield Cut("decode_expand", precision, batch, SmallBatchConfig(block_n, block_k, warps, stages))
                for splits in (5, 8, 16) if precision == "float8" else (8,):
                    launch_config = SmallBatchConfig(block_n, block_k, warps, stages, splits)
                    yield Cut("decode_contract", precision, batch, launch_config)


def _attentions() -> Iterator[Cut]:
    tiles = ((16, 2, 1), (32, 2, 1), (32, 4, 1), (32, 4, 2), (32, 4, 3), (64, 4, 1), (64, 8, 1))
    steps = ((16, 1, 3), (16, 1, 4), (16, 2, 4), (32, 1, 1), (32, 2, 3), (32, 2, 4), (32, 4, 3))
    launch_configs = [AttentionConfig(*shape) for shape in tiles] + [
        AttentionConfig(*shape, in_steps=True) for shape in steps
    ]
    for dtype in (_FLOAT8, torch.bfloat16):
        for batch, all_parts in ((1, (16, 32)), (16, (1, 2, 4)), (64, (1, 2))):
            for num_parts in all_parts:
                for launch_config in launch_configs:
                    yield Cut("rotary_decode_attention", "float8", batch, launch_config, dtype, _LONG, num_parts)


CUTS = (*_products(), *_attentions())
"""Every one, in the order in which they are timed."""


TINY = replace(
    MOONDREAM_2.text, dim=64, ff_dim=128, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=96, max_context=128
)
TINY_WITH_EXPERTS = replace(
    TINY, moe=MoeConfig(num_experts=4, start_layer=1, experts_per_token=2, expert_inner_dim=32), tau_attn=True
)
_EPSILON = 1e-5


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """‖got - wanted‖ / ‖wanted‖; anything undefined counts as infinite."""
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return error if error == error else float("inf")


def definition(operation: str) -> Callable[..., Any]:
    """The operation in plain torch."""
    return getattr(reference, operation)


# One operation of one layer


def expand_call(model: Model, batch: int) -> Callable[..., Any]:
    """`call(operation, layer)` → plain and activated columns."""
    device, config = model.text.wte.device, model.config
    torch.manual_seed(batch)
    hidden = torch.randn(batch, config.dim, device=device) + 0.1
    plain = torch.empty(batch, config.qkv_dim, device=device, dtype=model.activation_dtype)
    storage = torch.empty(batch, config.dim + config.ff_dim, device=device, dtype=model.activation_dtype)

    def call(operation: Callable[..., Any], layer: int, **options: Any) -> tuple[Tensor, ...]:
        up = model.blocks[layer].up
        inner = storage[:, config.dim :]
        operation(
            hidden, up.weight, up.scale, up.row_sums, up.bias, _EPSILON, config.qkv_dim, plain, inner, **options
        )
        return plain, inner

    return call


def contract_call(model: Model, batch: int) -> Callable[..., Any]:
    """`call(operation, layer)` → what is added to a stream of zeros."""
    device, config = model.text.wte.device, model.config
    torch.manual_seed(batch)
    activations = torch.randn(batch, config.dim + config.ff_dim, device=device).to(model.activation_dtype)
    hidden = torch.zeros(batch, config.dim, device=device)

    def call(operation: Callable[..., Any], layer: int, **options: Any) -> tuple[Tensor, ...]:
        down = model.blocks[layer].down
        operation(activations, down.weight, down.scale, down.bias, hidden, **options)
        return (hidden,)

    return call


def attention_call(model: Model, contexts: Contexts, cache: KVCache, num_parts: int) -> Callable[..., Any]:
    """`call(operation, layer)` → what is attended to."""
    torch.manual_seed(contexts.batch)
    return AttentionInputs(model.config, contexts, cache, model.activation_dtype, num_parts).run


# Correctness


@torch.no_grad()
def check_kernels(kernels: Kernels, model: Model, batches: list[int], longest: int) -> dict[str, float]:
    """Each kernel against its definition with the weights of one layer."""
    errors: dict[str, float] = {}
    device, config = model.text.wte.device, model.config

    def compare(name: str, operation: str, make: Callable[[], Callable[..., Any]]) -> None:
        with attempted(name):
            fast = getattr(kernels, operation)
            got, again, wanted = (
                torch.cat([part.flatten().double() for part in make()(function, 0)])
                for function in (fast, fast, definition(operation))
            )
            errors[name] = relative_error(got, wanted)
            note = "" if torch.equal(again, got) else "   AND TWO RUNS DIFFER"
            print(f"  {name:<66}{errors[name]:.2e}{note}", flush=True)

    for batch in batches:
        suffix = f"{model.precision}, batch {batch}"
        compare(f"decode_expand {suffix}", "decode_expand", lambda batch=batch: expand_call(model, batch))
        compare(f"decode_contract {suffix}", "decode_contract", lambda batch=batch: contract_call(model, batch))
        contexts = Contexts(batch, 0, longest)
        for dtype in (torch.bfloat16, FLOAT8):
            for num_parts in (1, 8):

                def attention(
                    dtype: torch.dtype = dtype, num_parts: int = num_parts, contexts: Contexts = contexts
                ) -> Callable[..., Any]:
                    cache = contexts.filled_cache(replace(config, n_layers=1), device, dtype)
                    return attention_call(model, contexts, cache, num_parts)

                what = f"rotary_decode_attention {str(dtype)[6:]} pages, {num_parts} parts, {suffix}"
                compare(what, "rotary_decode_attention", attention)
    return errors


@torch.no_grad()
def check_layers(kernels: Kernels, model: Model, contexts: Contexts, cache_dtype: torch.dtype) -> dict[str, Any]:
    """New keys and values of every layer, and the logits, against the plain decoder in float32."""
    device, config = model.text.wte.device, model.config
    cache = contexts.filled_cache(config, device, cache_dtype)
    wide = dequantised(cache, config)
    exact = TextModel(config).to(device)
    exact.load_state_dict(model.text.state_dict())
    positions, table = contexts.positions(device), contexts.page_table(device)
    embeddings = torch.randn(contexts.batch, config.dim, device=device).bfloat16()
    decoder = FusedDecoder(model.text, model.blocks, kernels)
    hidden = decoder.forward(embeddings, positions, table, cache, decoder.workspace(contexts.batch))
    wanted_hidden = exact(embeddings.float(), positions, wide.decode(positions, table))
    places = positions % cache.page_size
    pages = table.long().gather(1, (positions // cache.page_size)[:, None])[:, 0]
    rows = []
    for layer in range(config.n_layers):
        got, wanted = cache.layer(layer), wide.layer(layer)
        pairs = (
            (got.key_pages, got.key_scale, wanted.key_pages),
            (got.value_pages, got.value_scale, wanted.value_pages),
        )
        rows.append(
            [
                relative_error(
                    stored[pages, :, places].float() * (1.0 if scale is None else scale), right[pages, :, places]
                )
                for stored, scale, right in pairs
            ]
        )
    logits = torch.empty(contexts.batch, config.vocab_size, device=device)
    decoder.logits(hidden, model.head, logits)
    exact_logits = exact.logits(wanted_hidden)
    result = {
        "layers": rows,
        "hidden": relative_error(hidden, wanted_hidden),
        "logits": relative_error(logits, exact_logits),
        "same_best": (logits.argmax(1) == exact_logits.argmax(1)).float().mean().item(),
    }
    keys, values = zip(*rows, strict=True)
    print(f"  {model.precision} weights, {str(cache_dtype)[6:]} cache, batch {contexts.batch}")
    print("    new keys, by layer   " + " ".join(f"{error:.3f}" for error in keys))
    print("    new values, by layer " + " ".join(f"{error:.3f}" for error in values))
    print(
        "    " + "  ".join(f"{name} {result[name]:.4f}" for name in ("hidden", "logits", "same_best")), flush=True
    )
    return result


# Time


def time_kernels(
    kernels: Kernels, model: Model, limits: Limits, ranges: list[tuple[int, int]], batches: list[int]
) -> list[dict[str, Any]]:
    """Every operation alone, layer after layer so that no weight stays in the cache."""
    rows: list[dict[str, Any]] = []
    config, device = model.config, model.text.wte.device
    layers = range(config.n_layers)

    def row(name: str, batch: int, call: Callable[..., Any], operation: Callable[..., Any], size: float) -> None:
        with attempted(f"{name}, batch {batch}"), torch.no_grad():
            us = time_us([partial(call, operation, layer) for layer in layers])
            limit = size / limits.copy_bytes_per_s * 1e6
            rows.append({"name": name, "batch": batch, "us": us, "limit_us": limit})
            line = f"  {name:<60} batch {batch:>3}{us:>9.2f} us   limit {limit:>7.2f} us   {us / limit:>5.2f}x"
            print(line, flush=True)

    print(f"\nOperations alone, {model.precision} weights")
    block = model.blocks[0]
    for batch in batches:
        size = block.up.weight.nbytes
        row(f"expand {model.precision}", batch, expand_call(model, batch), kernels.decode_expand, size)
        size = block.down.weight.nbytes
        row(f"contract {model.precision}", batch, contract_call(model, batch), kernels.decode_contract, size)
        for shortest, longest in ranges:
            for cache_dtype in (torch.bfloat16, FLOAT8):
                contexts = Contexts(batch, shortest, longest)
                cache = contexts.filled_cache(config, device, cache_dtype)
                num_parts = FusedDecoder(model.text, model.blocks, kernels).num_parts_of(batch)
                call = attention_call(model, contexts, cache, num_parts)
                width = 2 * config.n_kv_heads * config.head_dim * cache_dtype.itemsize
                size = contexts.num_positions() * width
                name = f"attention {str(cache_dtype)[6:]} {shortest}..{longest}"
                row(name, batch, call, kernels.rotary_decode_attention, size)
    return rows


# Other cuts


def run_cut(cut: Cut, model: Model, caches: dict[tuple[int, torch.dtype], KVCache]) -> list[Callable[[], Any]]:
    """The calls of one cut, layer after layer."""
    operation = function_of("triton", cut.operation)
    if cut.operation == "rotary_decode_attention":
        contexts = Contexts(cut.batch, *cut.contexts)
        cache = caches.setdefault(
            (cut.batch, cut.dtype), contexts.filled_cache(model.config, model.text.wte.device, cut.dtype)
        )
        call = attention_call(model, contexts, cache, cut.num_parts)
    else:
        make = expand_call if cut.operation == "decode_expand" else contract_call
        call = make(model, cut.batch)
    return [partial(call, operation, layer, config=cut.launch_config) for layer in range(model.config.n_layers)]


@torch.no_grad()
def compile_cuts(cuts: list[Cut]) -> None:
    """Run each cut once on one layer, in a process of its own, so that the compiled kernel is found later."""
    device = torch.device("cuda")
    config = replace(MOONDREAM_2.text, n_layers=1, vocab_size=1024)
    text = random_text(config, device)
    models = {precision: Model.of(text, precision) for precision in ("model", "float8")}
    for cut in cuts:
        try:
            for call in run_cut(cut, models[cut.precision], {}):
                call()
        except Exception as failure:
            print(f"  {cut.name()} does not compile: {str(failure).splitlines()[0][:160]}", flush=True)
    torch.cuda.synchronize()


@torch.no_grad()
def tune(models: dict[Precision, Model], num_processes: int = 14) -> dict[str, dict[str, float]]:
    """Every kernel over its cuts: microseconds by case and cut, the best first."""
    started = time.perf_counter()
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_cuts, [list(CUTS[share::num_processes]) for share in range(num_processes)]))
    print(
        f"\nOther cuts, {len(CUTS)} compiled in {time.perf_counter() - started:.0f} s; us, best first", flush=True
    )
    table: dict[str, dict[str, float]] = {}
    caches: dict[tuple[int, torch.dtype], KVCache] = {}
    for cut in CUTS:
        if cut.precision not in models:
            continue
        try:
            us = time_us(run_cut(cut, models[cut.precision], caches), replays=5, rounds=1)
        except Exception:  # said when it was compiled
            continue
        table.setdefault(cut.case(), {})[cut.name()] = us
    for case, times in table.items():
        ranked = sorted(times.items(), key=lambda item: item[1])
        print(f"  {case}")
        for name, us in ranked[:6]:
            print(f"    {us:>8.2f}  {name}", flush=True)
    return table


def folder_of_results() -> Path:
    """Where the JSON goes; made if need be."""
    folder = Path(os.environ.get("OUT", "bench/out"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> int:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--precision", nargs="+", choices=["model", "float8"], default=["float8", "model"])
    parser.add_argument("--check", action="store_true", help="compare with float32 layer by layer")
    parser.add_argument("--tune", action="store_true", help="time the kernels over other cuts, and nothing else")
    parser.add_argument("--kernels", choices=["fastest", "triton", "reference"], default="fastest")
    parser.add_argument("--choose", type=parse_kernels, default=(), help="operation=implementation,…")
    parser.add_argument(
        "--experts",
        action="store_true",
        help="whole steps of a Moondream 3 with experts of 8 or 4 bits, other weights as chosen, and nothing else",
    )
    parser.add_argument("--expert-dtype", choices=["float8", "int4"], default="float8", help="with --experts")
    parser.add_argument("--tiny", action="store_true", help="a few thousand weights, to see that it runs")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = TINY if arguments.tiny else MOONDREAM_2.text
    ranges = [(3, 40)] if arguments.tiny else [(13, 300), (746, 1002)]
    # The step adds a token, so that the last of these fills the context.
    lengths = [step * config.max_context // 8 - 1 for step in (1, 2, 4, 6, 8)]
    batches = arguments.batches
    started = time.perf_counter()

    limits = measure_limits(device)
    print(f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s")
    chosen = {} if arguments.kernels == "fastest" else dict.fromkeys(OPERATIONS, str(arguments.kernels))
    kernels = Kernels.select(device.type, chosen | dict(arguments.choose))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "limits": asdict(limits)}
    result["kernels"] = {field.name: getattr(kernels, field.name).__module__ for field in fields(kernels)}
    if arguments.experts:
        config = TINY_WITH_EXPERTS if arguments.tiny else MOONDREAM_3.text
        text = random_text_with_experts(config, device, arguments.expert_dtype)
        own_ranges = ranges[: 1 + (not arguments.tiny)]
        result["expert_dtype"], result["steps"] = arguments.expert_dtype, []
        for precision in arguments.precision:
            result["steps"] += time_steps(kernels, Model.of(text, precision), limits, own_ranges, batches)
        target = folder_of_results() / f"decode_step_experts_{arguments.expert_dtype}.json"
        write_json(target, result)
        return 0
    text = random_text(config, device)
    models: dict[Precision, Model] = {precision: Model.of(text, precision) for precision in arguments.precision}
    target = folder_of_results() / ("decode_tuning.json" if arguments.tune else "decode_step.json")

    def write() -> None:
        """What is known so far, lest a time limit take it."""
        result["seconds"] = time.perf_counter() - started
        write_json(target, result)

    if arguments.tune:
        result["tuning"] = tune(models)
        write()
        return 0
    print("\nKernels against their definitions, relative error")
    checked = [batch for batch in batches if batch in (1, 16, 64)] or batches
    result["kernel_errors"] = {}
    for model in models.values():
        result["kernel_errors"] |= check_kernels(kernels, model, checked, ranges[0][1])
        write()
    if arguments.check:
        print("\nAgainst the plain decoder in float32, relative error")
        result["layer_errors"] = {}
        for model in models.values():
            for dtype in (torch.bfloat16, FLOAT8):
                with attempted(f"the check of {model.precision}, {dtype}"):
                    contexts = Contexts(min(8, max(batches)), *ranges[0])
                    errors = check_layers(kernels, model, contexts, dtype)
                    result["layer_errors"][f"{model.precision} {str(dtype)[6:]}"] = errors
        write()
    result["steps"], result["contexts"], result["operations"] = [], [], []
    for model in models.values():
        result["steps"] += time_steps(kernels, model, limits, ranges, batches)
        write()
        result["contexts"] += time_contexts(
            kernels, model, limits, lengths, [batch for batch in batches if batch <= 64]
        )
        write()
        result["operations"] += time_kernels(kernels, model, limits, ranges, batches)
        write()
    print(f"\n{result['seconds']:.0f} s; {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
