"""Is every kernel correct for random sizes, the same in every run, and what does it cost?

Checks: each implementation of each operation on random odd sizes, many runs of each call, against the definition in
float32 on the CPU. The table shows the largest error of all runs, relative to the largest value, and in how many
calls the runs gave different bits. Processes share the device, so that runs disturb one another.

Times (`--time`): operations that write in place, at the published models' sizes; both products of a decoder block,
layer by layer; whole decode steps. `--tree` takes the kernels and the runtime of another checkout:

    for tree in ../before . ../before .; do python -m bench.correctness.kernels --tree $tree --time; done
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.harness.output import write_json

_HERE = Path(__file__).resolve().parents[2]
_IMPLEMENTATIONS = ("triton", "cuda", "library")
_FLOAT8_SINCE = (8, 9)


def use_tree(tree: Path) -> None:
    """Import kernels and runtime from another checkout than this one."""
    sys.path[:0] = [str(tree / "kernels"), str(tree / "runtime")]


def check(seed: int, repeats: int, device_name: str, tree: Path) -> list[dict[str, Any]]:
    """Run the cases of one seed by every implementation; a row for each."""
    use_tree(tree)
    import torch

    from bench.correctness.kernel_cases import cases
    from kestrel_ops.device_limits import DeviceLimits

    device, rows = torch.device(device_name), []
    lacks_float8 = (DeviceLimits.of(device).capability or _FLOAT8_SINCE) < _FLOAT8_SINCE
    for case in cases(seed):
        if (case.needs_cuda and device.type == "cpu") or (lacks_float8 and "float8" in case.name):
            continue
        with torch.inference_mode():
            wanted = case.run(_function("reference", case.operation), torch.device("cpu"))
        for name in _IMPLEMENTATIONS:
            if importlib.util.find_spec(f"kestrel_ops.{name}.{case.operation}") is not None:
                row = {"operation": case.operation, "implementation": name, "case": case.name, "seed": seed}
                row["tolerance"] = case.tolerance
                rows.append(row | _compared(case, _function(name, case.operation), device, wanted, repeats))
    return rows


def _compared(case: Any, function: Callable[..., Any], device: Any, wanted: Any, repeats: int) -> dict[str, Any]:
    """The largest error of so many runs, and whether they are the same."""
    import torch

    from bench.correctness.kernel_cases import are_equal, error

    try:
        with torch.inference_mode():
            first = case.run(function, device)
            worst, same = error(first, wanted), True
            for _ in range(repeats - 1):
                again = case.run(function, device)
                if not are_equal(again, first):
                    same, worst = False, max(worst, error(again, wanted))
    except Exception as failure:
        message = str(failure).splitlines()[0][:200]
        return {"error": float("inf"), "same_bits": False, "failure": f"{type(failure).__name__}: {message}"}
    return {"error": worst, "same_bits": same}


def _function(implementation: str, operation: str) -> Callable[..., Any]:
    module = "reference" if implementation == "reference" else f"{implementation}.{operation}"
    return getattr(importlib.import_module(f"kestrel_ops.{module}"), operation)


def check_all(seeds: list[int], repeats: int, device: str, tree: Path, num_processes: int) -> list[dict[str, Any]]:
    """Every seed, in processes of their own, and a table of what came."""
    call = partial(check, repeats=repeats, device_name=device, tree=tree)
    if num_processes > 1:
        with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
            rows = [row for found in pool.map(call, seeds) for row in found]
    else:
        rows = [row for seed in seeds for row in call(seed)]
    print_checks(rows)
    return rows


def print_checks(rows: list[dict[str, Any]]) -> None:
    """A line for each implementation, then one for each call that is wrong or not the same in every run."""
    head = "calls   wrong  worst error  tolerance  runs differ"
    print(f"\n{'operation':<26}{'by':<9}{head}")
    for key in sorted({(row["operation"], row["implementation"]) for row in rows}):
        own = [row for row in rows if (row["operation"], row["implementation"]) == key]
        worst = max(own, key=lambda row: row["error"] / max(row["tolerance"], 1e-12))
        num_wrong = sum(is_wrong(row) for row in own)
        num_unequal = sum(not row["same_bits"] for row in own)
        counts = f"{key[0]:<26}{key[1]:<9}{len(own):>5}{num_wrong or '-':>8}"
        print(f"{counts}{worst['error']:>13.2e}{worst['tolerance']:>11.1e}{num_unequal or '-':>13}")
    for row in rows:
        if is_wrong(row) or not row["same_bits"]:
            what = row.get("failure") or f"error {row['error']:.2e} of {row['tolerance']:.1e}"
            note = "" if row["same_bits"] else ", runs differ"
            print(f"  {row['operation']}={row['implementation']} seed {row['seed']}: {row['case']}: {what}{note}")


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a call was off by more than its types explain."""
    return not row["error"] <= row["tolerance"]


# Time


def time_rows(device: Any) -> list[dict[str, Any]]:
    """Microseconds of what is read and written in place, at the sizes of the published models."""
    import torch

    from bench.harness.timing import time_us

    rows = []
    add_layer_norm, rotary = (_function("triton", name) for name in ("add_layer_norm", "rotary_write_kv"))
    short, wide, float8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    for count, dim, dtype, out in ((64, 2048, wide, short), (750, 2048, wide, float8), (6561, 1152, short, float8)):
        pairs = [(_random(device, count, dim, dtype), _random(device, count, dim, short)) for _ in range(6)]
        us = time_us([partial(add_layer_norm, *pair, 1e-5, out) for pair in pairs])
        rows.append({"name": f"add_layer_norm {count} x {dim} to {str(out)[6:]}", "us": us})
    for count in (752, 6000):
        storage = [_random(device, 32 * count, 64, short).to(float8).view(-1, 32, 16, 64) for _ in range(2)]
        numbers, scale = torch.arange(count, device=device), torch.ones(1, device=device)
        angles = _random(device, 8192, 16, wide)
        qkv = [_random(device, count, 14_336, short) for _ in range(4)]
        calls = [
            partial(rotary, packed[:, :6144], numbers, angles, angles, *storage, numbers, scale, scale)
            for packed in qkv
        ]
        rows.append({"name": f"rotary_write_kv {count} x 96 x 64", "us": time_us(calls)})
    return rows


def _layers(device: Any, precision: str) -> list[tuple[Any, ...]]:
    """Both matrices, their scales and their biases of eight decoder blocks of Moondream 2."""
    import torch

    layers = []
    for _ in range(8):
        up, down = (_random(device, *shape, torch.bfloat16) / 64 for shape in ((14_336, 2048), (2048, 10_240)))
        scales = [None, None]
        if precision == "float8":
            scales = [torch.full((len(weight),), 1 / 4096, device=device) for weight in (up, down)]
            up, down = ((weight * 4096).clamp(-448, 448).to(torch.float8_e4m3fn) for weight in (up, down))
        layers.append((up, down, *scales, torch.zeros(14_336, device=device), torch.zeros(2048, device=device)))
    return layers


def time_plans(device: Any) -> list[dict[str, Any]]:
    """Microseconds of `decode_contract` by other plans than those it chooses; of this checkout's kernels alone."""
    import torch

    from bench.harness.timing import time_us
    from kestrel_ops.triton.single_token import SingleTokenPlan
    from kestrel_ops.triton.small_batch import SmallBatchPlan

    contract, rows = _function("triton", "decode_contract"), []
    single = [(n, warps, size) for n, warps in ((4, 4), (4, 8), (8, 8), (2, 4), (2, 2)) for size in (1024, 2048)]
    for precision, dtype in (("float8", torch.float16), ("bfloat16", torch.bfloat16)):
        layers = _layers(device, precision)
        plans: list[tuple[int, Any]] = [
            (1, SingleTokenPlan(n, warps, tile_bytes=size)) for n, warps, size in single
        ]
        for batch, is_early in ((16, False), (64, True)):
            cuts = ((64, 128, 3, 8), (64, 128, 4, 8), (64, 128, 3, 16), (64, 128, 4, 5), (64, 128, 4, 4))
            plans += [(batch, SmallBatchPlan(n, k, 4, stages, splits, is_early)) for n, k, stages, splits in cuts]
        for batch, plan in plans:
            hidden, storage = _random(device, batch, 2048, torch.float32), _random(device, batch, 10_240, dtype)

            def one(layer: Any, hidden: Any = hidden, storage: Any = storage, plan: Any = plan) -> None:
                contract(storage, layer[1], layer[3], layer[5], hidden, plan=plan)

            us = time_us([partial(one, layer) for layer in layers])
            rows.append({"name": f"contract, {precision}, batch {batch}, {plan}", "us": us})
    return rows


def time_products(device: Any, batches: list[int]) -> list[dict[str, Any]]:
    """Microseconds of both products of a decoder block of Moondream 2, as a step runs them."""
    import torch

    from bench.harness.timing import time_us

    expand, contract = (_function("triton", name) for name in ("decode_expand", "decode_contract"))
    defers = "may_defer" in inspect.signature(contract).parameters
    rows = []
    for precision, dtype in (("float8", torch.float16), ("bfloat16", torch.bfloat16)):
        layers = _layers(device, precision)
        for batch in batches:
            hidden, qkv = _random(device, batch, 2048, torch.float32), _random(device, batch, 6144, dtype)
            storage = _random(device, batch, 10_240, dtype)
            pending: list[Any] = [None]

            def block(layer: Any, out: tuple[Any, ...] = (hidden, qkv, storage, pending)) -> None:
                stream, plain, activations, deferred = out
                up, down, up_scale, down_scale, up_bias, down_bias = layer
                more = (deferred[0],) if defers else ()
                inner = activations[:, 2048:]
                expand(stream, up, up_scale, up_bias, up_bias, 1e-5, 6144, plain, inner, *more)
                more = (True,) if defers else ()
                deferred[0] = contract(activations, down, down_scale, down_bias, stream, *more)

            def one(layer: Any, hidden: Any = hidden, storage: Any = storage) -> None:
                contract(storage, layer[1], layer[3], layer[5], hidden)

            for name, call in (("expand and contract", block), ("contract", one)):
                us = time_us([partial(call, layer) for layer in layers])
                rows.append({"name": f"{name}, {precision}, batch {batch}", "us": us})
    return rows


def time_steps(device: Any, batches: list[int]) -> list[dict[str, Any]]:
    """Microseconds of whole decode steps of random weights, keys and values in float8, contexts 13 to 300."""
    import torch

    from bench.harness.decode_steps import FLOAT8, Contexts, Model, time_step
    from bench.harness.prefill_inputs import random_text
    from kestrel_ops import Kernels
    from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2

    kernels, text = Kernels.select(device.type, {}), random_text(MOONDREAM_2.text, device)
    rows = []
    for precision in ("float8", "model"):
        with torch.no_grad():
            model = Model.of(text, precision)
        for batch in batches:
            contexts = Contexts(batch, 13, 300)
            cache = contexts.filled_cache(MOONDREAM_2.text, device, FLOAT8)
            us = min(time_step(kernels, model, contexts, cache, True) for _ in range(3))
            rows.append({"name": f"whole step, {precision} weights, batch {batch}", "us": us})
    return rows


def _random(device: Any, *shape_and_dtype: Any) -> Any:
    import torch

    *shape, dtype = shape_and_dtype
    return torch.randn(shape, device=device).to(dtype)


def main() -> int:
    """Check or measure, print and write; 1 where a kernel is wrong or its runs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=_HERE, help="checkout whose kernels and runtime are used")
    parser.add_argument("--seeds", type=int, default=10, help="times 48 calls")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=30, help="runs of each call")
    parser.add_argument("--processes", type=int, default=12, help="that check at the same time")
    parser.add_argument("--device", default=None, help="cuda, or cpu where kernels run in Triton's interpreter")
    parser.add_argument("--time", action="store_true", help="measure, and check nothing")
    parser.add_argument("--plans", action="store_true", help="measure decode_contract by other plans, and no more")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    file = Path(os.environ.get("OUT", "bench/out")) / "kernels.json"
    parser.add_argument("--json", type=Path, default=file, help="default: %(default)s")
    arguments = parser.parse_args()
    use_tree(arguments.tree.resolve())
    import torch

    started = time.perf_counter()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the first kernel is imported
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "tree": str(arguments.tree)}
    print(f"{name}, torch {torch.__version__}, kernels of {arguments.tree}", flush=True)
    is_bad = False
    if arguments.time or arguments.plans:
        result["times"] = []
        products, steps = (partial(measure, batches=arguments.batches) for measure in (time_products, time_steps))
        for measure in (time_plans,) if arguments.plans else (time_rows, products, steps):
            for row in measure(device):
                result["times"].append(row)
                print(f"  {row['name']:<58}{row['us']:>10.2f} us", flush=True)
    else:
        seeds = list(range(arguments.first_seed, arguments.first_seed + arguments.seeds))
        processes = min(arguments.processes, len(seeds)) if device.type == "cuda" else 1
        rows = check_all(seeds, arguments.repeats, str(device), arguments.tree.resolve(), processes)
        result["checks"] = rows
        num_bad = sum(is_wrong(row) or not row["same_bits"] for row in rows)
        is_bad = num_bad > 0
        print(f"\n{len(rows)} calls, {arguments.repeats} runs each: {num_bad} wrong or not the same in every run")
    result["seconds"] = time.perf_counter() - started
    write_json(arguments.json, result)
    print(f"{result['seconds']:.0f} s; {arguments.json}")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
