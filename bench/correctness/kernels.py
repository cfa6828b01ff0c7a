"""Is every kernel correct for random sizes, and the same in every run?

Runs each implementation of each operation on random odd sizes, many times each call, and compares it with the
definition in float32 on the CPU. The table shows the largest error of all runs, relative to the largest value, and
in how many calls the runs gave different bits. Processes share the device, so that runs disturb one another.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.harness.output import parser_of, write_json

_IMPLEMENTATIONS = ("triton", "cuda", "library")
_FLOAT8_SINCE = (8, 9)


def check(seed: int, repeats: int, device_name: str) -> list[dict[str, Any]]:
    """Run the cases of one seed by every implementation; a row for each."""
    import torch

    from bench.correctness.kernel_cases import cases
    from kestrel_ops.device_limits import DeviceLimits
    from kestrel_ops.dispatch import function_of, has_implementation

    device, rows = torch.device(device_name), []
    lacks_float8 = (DeviceLimits.of(device).capability or _FLOAT8_SINCE) < _FLOAT8_SINCE
    for case in cases(seed):
        if (case.needs_cuda and device.type == "cpu") or (lacks_float8 and "float8" in case.name):
            continue
        with torch.inference_mode():
            wanted = case.run(function_of("reference", case.operation), torch.device("cpu"))
        for name in _IMPLEMENTATIONS:
            if has_implementation(name, case.operation):
                row: dict[str, Any] = {"operation": case.operation, "implementation": name, "case": case.name}
                row |= {"seed": seed, "tolerance": case.tolerance}
                rows.append(row | _compared(case, function_of(name, case.operation), device, wanted, repeats))
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


def check_all(seeds: list[int], repeats: int, device: str, num_processes: int) -> list[dict[str, Any]]:
    """Every seed, in processes of their own, and a table of what came."""
    call = partial(check, repeats=repeats, device_name=device)
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


def main() -> int:
    """Check, print and write; 1 where a kernel is wrong or its runs differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="times 48 calls")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=30, help="runs of each call")
    parser.add_argument("--processes", type=int, default=12, help="that check at the same time")
    parser.add_argument("--device", default=None, help="cuda, or cpu where kernels run in Triton's interpreter")
    file = Path(os.environ.get("OUT", "bench/out")) / "kernels.json"
    parser.add_argument("--json", type=Path, default=file, help="default: %(default)s")
    arguments = parser.parse_args()
    import torch

    started = time.perf_counter()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the first kernel is imported
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    seeds = list(range(arguments.first_seed, arguments.first_seed + arguments.seeds))
    processes = min(arguments.processes, len(seeds)) if device.type == "cuda" else 1
    rows = check_all(seeds, arguments.repeats, str(device), processes)
    num_bad = sum(is_wrong(row) or not row["same_bits"] for row in rows)
    print(f"\n{len(rows)} calls, {arguments.repeats} runs each: {num_bad} wrong or not the same in every run")
    seconds = time.perf_counter() - started
    write_json(arguments.json, {"device": name, "torch": torch.__version__, "checks": rows, "seconds": seconds})
    print(f"{seconds:.0f} s; {arguments.json}")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
