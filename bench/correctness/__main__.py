"""Is what the engine computes right? One command for a machine, with or without a GPU.

    python -m bench.correctness                              all stages below, in this order
    python -m bench.correctness fixtures dimensions          only these

- `fixtures`: `kestrel-grpc verify` of every folder of `--fixtures`, in float32 `--runs` times, and once in bfloat16
  and with each float8 switch.
- `dimensions`: the float32 paths at `--shapes` shapes, `--runs` times each; then the shorter formats, once each.
- `width-48`: one shape of width 48 with odd tails, four times as often.
- `kernels`: every kernel on random sizes; needs a GPU.
- `load`: answers under mixed load against those of a quiet engine.
- `determinism`: `--deterministic` gives equal bits at any load.

Each of the last five is a module of its own with more options, such as `python -m bench.correctness.load --help`.
Leaves a log of each command in `--out`; exits with 1 if any of them failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.correctness.dimensions import PATHS, REDUCED_PATHS

STAGES = ("fixtures", "dimensions", "width-48", "kernels", "load", "determinism")
Command = tuple[str, ...]
"""A module and its arguments."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(
        "bench.correctness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    result.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="%(default)s")
    golden = ("tests/golden/md2-small", "tests/golden/md3-small")
    result.add_argument("--fixtures", nargs="+", default=golden, help="folders of reference fixtures")
    result.add_argument("--runs", type=int, default=5, help="of each float32 path (%(default)s)")
    result.add_argument("--shapes", type=int, default=10, help="of small models (%(default)s)")
    jobs = max(1, min(10, (os.cpu_count() or 1) // 2))
    result.add_argument("--jobs", type=int, default=jobs, help="folders or shapes at a time (%(default)s)")
    result.add_argument("--out", type=Path, default=Path("bench/out/correctness"), help="%(default)s")
    return result


def commands(stage: str, options: argparse.Namespace) -> Iterator[tuple[str, Command]]:
    """The commands of a stage, each with the name of its log."""
    device = ("--device", options.device)
    if stage == "fixtures":
        for folder in options.fixtures:
            verify = ("kestrel_grpc", "verify", folder, *device)
            for run in range(options.runs):
                yield f"verify-{Path(folder).name}-float32-{run}", (*verify, "--dtype", "float32")
            for name in REDUCED_PATHS:
                yield f"verify-{Path(folder).name}-{name}", (*verify, *PATHS[name].options())
    elif stage == "dimensions":
        sweep = (
            "bench.correctness.dimensions",
            *device,
            "--shapes",
            str(options.shapes),
            "--jobs",
            str(options.jobs),
        )
        for kind, runs in (("float32", options.runs), ("reduced", 1)):
            file = str(options.out / f"dimensions-{kind}.json")
            yield f"dimensions-{kind}", (*sweep, "--paths", kind, "--runs", str(runs), "--json", file)
    elif stage == "width-48":
        sweep = ("bench.correctness.dimensions", *device, "--shape", "width-48", "--runs", str(4 * options.runs))
        yield stage, (*sweep, "--json", str(options.out / "width-48.json"))
    elif stage == "kernels":
        yield stage, ("bench.correctness.kernels", "--json", str(options.out / "kernels.json"))
    else:
        yield stage, (f"bench.correctness.{stage}", *device, "--json", str(options.out / f"{stage}.json"))


def run(name: str, command: Command, folder: Path) -> bool:
    """Run one command with its output in a log, and print what failed and the last line. True if it passed."""
    started = time.perf_counter()
    log = folder / f"{name}.txt"
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run((sys.executable, "-m", *command), stdout=file, stderr=subprocess.STDOUT).returncode
    lines = log.read_text(encoding="utf-8").splitlines() or ["(no output)"]
    shown = [line for line in lines[:-1] if "FAILED" in line] + lines[-1:]
    verdict = "passed" if status == 0 else f"FAILED ({status})"
    print(f"{name}: {verdict} in {time.perf_counter() - started:.0f} s", *shown, sep="\n  ", flush=True)
    return status == 0


def main() -> int:
    """Run the stages; 1 if something failed."""
    options = parser().parse_args()
    unknown = sorted(set(options.stages) - set(STAGES))
    if unknown:
        parser().error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    passed = True
    for stage in options.stages or STAGES:
        print(f"\n== {stage}", flush=True)
        with ThreadPoolExecutor(options.jobs if stage == "fixtures" else 1) as pool:
            results = [pool.submit(run, *item, options.out) for item in commands(stage, options)]
        passed = all(result.result() for result in results) and passed
    print(f"\n{'all passed' if passed else 'something failed'}; see {options.out}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
