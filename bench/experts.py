"""What does one layer of a Moondream 3's experts cost, beside what reading and multiplying them must take?

Full-size random weights in several layers, so that no expert stays in the cache from one call to the next; calls
are replayed from a graph. The limit is the larger of the bytes of the experts that are chosen over 4.17 TB/s, which
is what an H200 reads, and of the operations over 785 TFLOP/s in bfloat16 and 1,387 in float8 (which experts of 4
bits become), which is what its largest products reach. Routing is random (near even), even (all experts alike) or
skewed: one expert has every token and half of them have none.

Every row has each implementation of the operation, so that the grouped products of the library stand beside the
kernels. `--check` compares both with the definition in float32 and every run with the next; `--parts` shows what
each consists of; `--tune` times other plans of the kernels, each product alone, the best first.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness.output import parser_of, write_json
from bench.harness.prefill_inputs import int4_experts, quantised_experts, random_experts
from bench.harness.serving import machine_facts
from bench.harness.timing import attempted, time_us
from kestrel_ops.compilation.triton_dependent_launch import has_dependent_launch
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.dispatch import function_of
from kestrel_ops.experts.reference import mixture_of_experts as definition
from kestrel_ops.experts.reference_int4 import INT4_GROUP
from kestrel_ops.experts.triton_int4_products import contract_int4, expand_int4
from kestrel_ops.experts.triton_launch_configs import (
    ONE_TOKEN,
    ONE_TOKEN_INT4,
    ExpertsConfig,
    OneTokenConfig,
    ProductConfig,
    config_for,
    int4_config_for,
)
from kestrel_ops.experts.triton_products import combine, contract, expand, quantised_rows
from kestrel_ops.experts.triton_routing import route
from kestrel_ops.shapes import FLOAT8
from kestrel_runtime.models.moondream.config import MoeConfig
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_3

_PREFETCHED = (0, 256, 512)


def cuts(precision: str, num_tokens: int) -> list[ExpertsConfig | OneTokenConfig]:
    """The plans to try, the one that is used first."""
    return list(dict.fromkeys(_cuts(precision, num_tokens)))


def _cuts(precision: str, num_tokens: int) -> Iterator[ExpertsConfig | OneTokenConfig]:
    if num_tokens == 1:
        yield ONE_TOKEN_INT4 if precision == "int4" else ONE_TOKEN
        sizes = (8_192, 16_384, 32_768, 65_536)
        for first, second, warps in product(sizes, sizes, (4, 8)):
            yield OneTokenConfig(first, second, warps)
        return
    moe = MOONDREAM_3.text.moe
    assert moe is not None
    limits = DeviceLimits.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    operand = operand_type(precision, limits)
    used = planned(precision, num_tokens, moe, limits)
    yield used
    if operand == FLOAT8:
        yield replace(used, quantises_rows=not used.quantises_rows)
    block, most = used.block_tokens, used.block_tokens // 4
    if precision == "int4":
        yield from _int4_cuts(used)
        return
    for launch_config in _products(operand.itemsize, block):
        shared = (
            (2 * launch_config.rows + block) * launch_config.columns * operand.itemsize * launch_config.num_stages
        )
        if shared <= limits.shared_bytes and launch_config.rows * block <= most * 64 * launch_config.num_warps:
            yield replace(used, expand=replace(launch_config, is_read_once=used.expand.is_read_once))
    for launch_config, prefetched in product(_products(operand.itemsize, block), _PREFETCHED):
        shared = (launch_config.rows + block) * launch_config.columns * operand.itemsize * launch_config.num_stages
        if shared <= limits.shared_bytes:
            own = replace(launch_config, is_read_once=used.contract.is_read_once, prefetched_bytes=prefetched)
            yield replace(used, contract=own)


def _int4_cuts(used: ExpertsConfig) -> Iterator[ExpertsConfig]:
    if used.block_tokens <= 64:
        for (rows, warps), num_stages in product(((64, 4), (64, 8), (128, 8)), (2, 3, 4, 5, 6)):
            yield replace(used, expand=replace(used.expand, rows=rows, num_warps=warps, num_stages=num_stages))
        for (rows, warps), num_stages in product(((64, 4), (128, 4), (128, 8)), (2, 3, 4, 5, 6)):
            yield replace(used, contract=replace(used.contract, rows=rows, num_warps=warps, num_stages=num_stages))
        return
    for num_stages in (2, 3, 4):
        yield replace(used, expand=replace(used.expand, num_stages=num_stages))
    for (rows, warps), num_stages in product(((64, 4), (128, 8)), (2, 3, 4)):
        yield replace(used, contract=replace(used.contract, rows=rows, num_warps=warps, num_stages=num_stages))


def operand_type(precision: str, limits: DeviceLimits) -> torch.dtype:
    """What tensor cores multiply."""
    return torch.bfloat16 if precision == "model" or not limits.has_float8 else FLOAT8


def planned(precision: str, num_tokens: int, moe: MoeConfig, limits: DeviceLimits) -> ExpertsConfig:
    """The launch configuration for more than one token that is used."""
    choose = int4_config_for if precision == "int4" else config_for
    return choose(num_tokens, moe.num_experts, moe.experts_per_token, operand_type(precision, limits), limits)


def _products(itemsize: int, block: int) -> Iterator[ProductConfig]:
    """Of few tokens tiles are small and what matters is how many are loaded at once."""
    shapes = ((64, 4), (128, 8)) if block <= 32 else ((64, 4), (128, 4), (128, 8))
    stages = (3, 4, 6, 8) if block <= 32 else (3, 4)
    for (rows, warps), line, num_stages in product(shapes, (64, 128, 256), stages):
        yield ProductConfig(rows, line // itemsize, warps, num_stages)


def plan_name(launch_config: ExpertsConfig | OneTokenConfig) -> str:
    """How it does it."""
    if isinstance(launch_config, OneTokenConfig):
        return (
            f"bytes {launch_config.expand_bytes} and {launch_config.contract_bytes} warps {launch_config.num_warps}"
        )
    first, second = (
        f"{each.rows}x{each.columns} w{each.num_warps} s{each.num_stages} p{each.prefetched_bytes}"
        for each in (launch_config.expand, launch_config.contract)
    )
    quantised = "  quantised" * launch_config.quantises_rows
    return f"tokens {launch_config.block_tokens}  expand {first}{quantised}  contract {second}"


@torch.no_grad()
def stage_times(
    stacks: list[tuple[Tensor, ...]],  # of each layer: both weights and, where they are float8, their scales
    tokens: list[tuple[Tensor, Tensor]],  # of each layer: rows and logits
    choices: int,
    launch_config: ExpertsConfig,
) -> dict[str, float]:
    """Microseconds of a layer by stage."""
    hidden = tokens[0][0]
    is_int4 = stacks[0][0].dtype == torch.uint8
    quantises = (is_int4 or stacks[0][0].dtype == FLOAT8) and hidden.dtype != torch.float32
    rounds = quantises and launch_config.quantises_rows
    block, between = launch_config.block_tokens, FLOAT8 if quantises and not rounds else hidden.dtype
    times: dict[str, float] = {}

    def stage(name: str, calls: list[partial[object]]) -> list[object]:
        times[name] = time_us(calls, replays=5)
        return [call() for call in calls]

    later = partial(partial, is_dependent=has_dependent_launch(hidden))
    scales = [stack[2:] or (None, None) for stack in stacks]
    routings = stage("route", [later(route, *own, choices, block, quantises=quantises) for own in tokens])
    each = list(zip(routings, stacks, scales, strict=True))
    inner = stage(
        "expand",
        [
            later(
                expand_int4 if is_int4 else expand,
                routing,
                stack[0],
                own[0],
                None,
                launch_config.expand,
                block,
                between,
            )
            for routing, stack, own in each
        ],
    )
    if rounds:
        inner = stage("round", [later(quantised_rows, rows) for rows in inner])
    rows = stage(
        "contract",
        [
            later(
                contract_int4 if is_int4 else contract,
                *(routing, own, stack[1], scale[1], None, launch_config.contract, block, hidden.dtype),
            )
            for own, (routing, stack, scale) in zip(inner, each, strict=True)
        ],
    )
    stage("combine", [later(combine, routing, own) for routing, own in zip(routings, rows, strict=True)])
    return times


READ_BYTES_PER_S = 4.17e12
FLOPS_PER_S = {"model": 785e12, "float8": 1387e12, "int4": 1387e12}
BYTES_OF_WEIGHT = {"model": 2.0, "float8": 1.0, "int4": 0.5 + 2 / INT4_GROUP}
PRECISIONS = ("float8", "model", "int4")
ROUTINGS = ("random", "even", "skewed")
TOKENS = (1, 4, 16, 64, 746, 6000)
SMALL = (64, MoeConfig(num_experts=8, start_layer=0, experts_per_token=2, expert_inner_dim=32))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions of a layer."""

    dim: int
    moe: MoeConfig

    def limit_us(self, num_tokens: int, num_chosen: int, precision: str) -> float:
        """What reading so many experts and multiplying takes at the least."""
        weights = 3 * self.dim * self.moe.expert_inner_dim
        read_s = num_chosen * weights * BYTES_OF_WEIGHT[precision] / READ_BYTES_PER_S
        flops = 2 * num_tokens * self.moe.experts_per_token * weights
        return max(read_s, flops / FLOPS_PER_S[precision]) * 1e6

    def stacks(self, precision: str, count: int, device: torch.device) -> list[tuple[Tensor, ...]]:
        """The weights of so many layers: first and second product, then their scales in float8."""
        found = []
        for _ in range(count):
            experts = random_experts(1, self.moe.num_experts, self.dim, self.moe.expert_inner_dim, device)
            if precision == "float8":
                experts = quantised_experts(*experts)
            found.append(int4_experts(*experts[2:]) if precision == "int4" else experts[2:])
        return found

    def tokens(self, count: int, routing: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random rows, and logits that lead them where the routing says."""
        hidden = torch.randn(count, self.dim, device=device).bfloat16()
        num_experts, choices = self.moe.num_experts, self.moe.experts_per_token
        logits = torch.randn(count, num_experts, device=device)
        if routing == "even":
            places = torch.arange(count * choices, device=device).view(count, choices) % num_experts
            logits.scatter_add_(1, places, torch.full(places.shape, 50.0, device=device))
        if routing == "skewed":
            logits[:, 0] += 50
            logits[:, max(choices, num_experts // 2) :] -= 50
        return hidden, logits.bfloat16()


def experts_of(implementation: str) -> Callable[..., Tensor]:
    """The operation."""
    return function_of(implementation, "mixture_of_experts")


def calls(
    sizes: Sizes,
    function: Callable[..., Tensor],
    stacks: list[tuple[Tensor, ...]],
    tokens: list[tuple[Tensor, Tensor]],
    **more: Any,
) -> list[Callable[[], Tensor]]:
    """A call for each layer."""
    choices = sizes.moe.experts_per_token
    return [
        partial(function, hidden, logits, *stack[:2], choices, *stack[2:], **more)
        for (hidden, logits), stack in zip(tokens, stacks, strict=True)
    ]


@torch.no_grad()
def check(call: Callable[[], Tensor], wanted: Tensor) -> dict[str, Any]:
    """How far a call is from the definition, and whether it gives the same bits again."""
    got = call()
    difference = got.double() - wanted.double()
    return {
        "error": (difference.norm() / wanted.double().norm()).item(),
        "same_bits": all(torch.equal(call(), got) for _ in range(3)),
    }


@torch.no_grad()
def exact(hidden: Tensor, logits: Tensor, stack: tuple[Tensor, ...], choices: int) -> Tensor:
    """The definition in float32, with float8 weights as they are."""
    up, down, *scales = stack
    if not scales:
        up, down = up.float(), down.float()
    up_scale, down_scale = scales or (None, None)
    return definition(hidden.float(), logits, up, down, choices, up_scale, down_scale)


@torch.no_grad()
def kernel_times(run: list[Callable[[], Tensor]]) -> dict[str, float]:
    """Microseconds of a call by kernel; kernels that overlap count fully."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in run * 3:
            call()
        torch.cuda.synchronize()
    return {
        event.key[:48]: event.self_device_time_total / (3 * len(run))
        for event in profiler.key_averages()
        if event.self_device_time_total
    }


def parts(
    sizes: Sizes,
    implementation: str,
    run: list[Callable[[], Tensor]],
    stacks: list[tuple[Tensor, ...]],
    tokens: list[tuple[Tensor, Tensor]],
    precision: str,
) -> dict[str, float]:
    """Microseconds of a call by stage, or by kernel of what has no stages: one token, and the library."""
    num_tokens, choices = len(tokens[0][0]), sizes.moe.experts_per_token
    if implementation == "triton" and num_tokens > 1:
        launch_config = planned(precision, num_tokens, sizes.moe, DeviceLimits.of(tokens[0][0].device))
        return stage_times(stacks, tokens, choices, launch_config)
    return kernel_times(run) if torch.cuda.is_available() else {}


def measure(sizes: Sizes, arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each precision, number of tokens and routing."""
    rows: list[dict[str, Any]] = []
    choices = sizes.moe.experts_per_token
    for precision in arguments.precision:
        stacks = sizes.stacks(precision, arguments.layers, device)
        for count in arguments.tokens:
            for routing in arguments.routing:
                tokens = [sizes.tokens(count, routing, device) for _ in stacks]
                chosen = [len(logits.topk(choices).indices.unique()) for _, logits in tokens]
                limit_us = sum(sizes.limit_us(count, each, precision) for each in chosen) / len(chosen)
                row: dict[str, Any] = {"precision": precision, "tokens": count, "routing": routing}
                row |= {"limit_us": limit_us}
                wanted = exact(*tokens[0], stacks[0], choices) if arguments.check else None
                line = f"{precision:<8}{count:>6} {routing:<8} limit{limit_us:>8.1f} us"
                for name in arguments.implementations:
                    with attempted(f"{name}, {count} tokens, {precision}, {routing}"), torch.no_grad():
                        run = calls(sizes, experts_of(name), stacks, tokens)
                        us = time_us(run, replays=7 if count < 1000 else 3)
                        row[name] = {"us": us, "of_limit": limit_us / us}
                        line += f"  {name}{us:>9.1f} us {limit_us / us:>5.0%}"
                        if wanted is not None:
                            row[name] |= check(run[0], wanted)
                            line += f" error {row[name]['error']:.1e}"
                            line += "" if row[name]["same_bits"] else " RUNS DIFFER"
                        if arguments.parts:
                            row[name]["parts_us"] = parts(sizes, name, run, stacks, tokens, precision)
                print(line, flush=True)
                for name in arguments.implementations if arguments.parts else ():
                    for part, us in row.get(name, {}).get("parts_us", {}).items():
                        print(f"        {name:<8} {us:>8.1f} us  {part}", flush=True)
                rows.append(row)
    return rows


def compile_plans(work: list[tuple[str, int, Any]]) -> None:
    """Run each launch configuration once, in a process of its own, so that its kernels are found later."""
    device = torch.device("cuda")
    sizes = published()
    stacks = {precision: sizes.stacks(precision, 1, device) for precision in {each[0] for each in work}}
    for precision, count, launch_config in work:
        try:
            tokens = [sizes.tokens(count, "random", device)]
            calls(sizes, experts_of("triton"), stacks[precision], tokens, config=launch_config)[0]()
        except Exception as failure:
            print(
                f"  {plan_name(launch_config)} does not compile: {str(failure).splitlines()[0][:120]}", flush=True
            )
    torch.cuda.synchronize()


@torch.no_grad()
def tune(sizes: Sizes, arguments: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Plans of the kernels: microseconds by case and launch configuration."""
    started = time.perf_counter()
    work = [
        (precision, count, launch_config)
        for precision in arguments.precision
        for count in arguments.tokens
        for launch_config in cuts(precision, count)
    ]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_plans, [work[share::14] for share in range(14)]))
    print(f"\n{len(work)} plans compiled in {time.perf_counter() - started:.0f} s; us, best first", flush=True)
    table: dict[str, dict[str, float]] = {}
    for precision in arguments.precision:
        stacks = sizes.stacks(precision, arguments.layers, device)
        for count in arguments.tokens:
            tokens = [sizes.tokens(count, "random", device) for _ in stacks]
            times = table.setdefault(f"{precision} {count}", {})
            for launch_config in (
                launch_config for own, number, launch_config in work if (own, number) == (precision, count)
            ):
                try:
                    run = calls(sizes, experts_of("triton"), stacks, tokens, config=launch_config)
                    times[plan_name(launch_config)] = time_us(run, replays=5, rounds=1)
                except Exception:  # said when it was compiled
                    continue
            print(f"  {precision}, {count} tokens")
            for name, us in sorted(times.items(), key=lambda item: item[1])[:8]:
                print(f"    {us:>8.1f}  {name}", flush=True)
    return table


def published() -> Sizes:
    """Those of the published Moondream 3."""
    text = MOONDREAM_3.text
    assert text.moe is not None
    return Sizes(text.dim, text.moe)


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    result.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    result.add_argument("--routing", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    result.add_argument("--implementations", nargs="+", default=("library", "triton", "cuda"))
    result.add_argument("--layers", type=int, default=4, help="layers whose weights take turns (%(default)s)")
    result.add_argument("--check", action="store_true", help="compare with the definition in float32")
    result.add_argument("--parts", action="store_true", help="show the kernels of each implementation")
    result.add_argument("--tune", action="store_true", help="time other plans of the kernels, and nothing else")
    result.add_argument("--small", action="store_true", help="a few thousand weights, to see that it runs")
    result.add_argument(
        "--json",
        type=Path,
        default=Path(os.environ.get("OUT", "bench/out")) / "experts.json",
        help="the file of the numbers (%(default)s)",
    )
    return result


def main() -> int:
    """Measure, print and write."""
    arguments = parser().parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(1)
    sizes = Sizes(*SMALL) if arguments.small else published()
    result: dict[str, Any] = {"machine": machine_facts(), "layers": arguments.layers}
    if arguments.tune:
        result["tuning"] = tune(sizes, arguments, device)
    else:
        result["rows"] = measure(sizes, arguments, device)
    write_json(arguments.json, result)
    print(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
