"""Do all paths compute what the reference computes, at dimensions that no published model has?

Writes small random checkpoints (a fixed list that is hard for kernels, and dimensions drawn from a seed), computes
every case of each on the CPU in float32 with the reference operations, and holds every path against that with the
tolerances of `kestrel-grpc verify`, several runs each. Where a path fails, each of its operations is replaced by
its reference in turn, to name the kernels without which it passes. Prints a table and writes JSON; exits with 1 if
any case failed.

    python -m bench.correctness.dimensions                                 # 10 shapes, float32 paths, 5 runs
    python -m bench.correctness.dimensions --shape width-48 --runs 20
    python -m bench.correctness.dimensions --paths reduced --runs 2
    python -m bench.correctness.dimensions --device cpu --shape seed-7 --paths fused
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bench.correctness.models import HARD_SHAPES, TOKENS, ModelShape, drawn_shape, write_scaled_model
from bench.harness.output import Progress, parser_of, write_json
from bench.harness.serving import machine_facts
from bench.harness.workload import chart
from kestrel_ops import Kernels
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.family import Case
from kestrel_runtime.verify.recording import Call, Picture, call_of, query_call, record_expected, write_questions
from kestrel_runtime.verify.reference_fixture import ReferenceFixture

_MOST_COMPLAINTS = 3
"""Kept of each path."""
_DRAWN = "seed-"


@dataclass(frozen=True, slots=True)
class ModelPath:
    """Settings of an engine that say how it computes."""

    dtype: str
    text: str = "fused"
    vision: str = "fused"
    kv_dtype: str = "auto"
    cuda_graphs: bool | None = None
    """None: as the engine decides."""

    @property
    def needs_cuda(self) -> bool:
        """Whether it only exists on a GPU."""
        return bool(self.cuda_graphs)

    def options(self) -> list[str]:
        """The options of `kestrel-grpc verify` for a path that leaves the graphs to the engine."""
        own = {"text-backend": self.text, "vision-backend": self.vision, "kv-dtype": self.kv_dtype}
        return [
            "--dtype",
            self.dtype,
            *(word for name, value in own.items() for word in ("--set", f"{name}={value}")),
        ]


PATHS: Mapping[str, ModelPath] = MappingProxyType(
    {
        "plain": ModelPath("float32", "plain", "plain"),
        "fused": ModelPath("float32", cuda_graphs=False),
        "fused-graphs": ModelPath("float32", cuda_graphs=True),
        "bfloat16-plain": ModelPath("bfloat16", "plain", "plain"),
        "bfloat16": ModelPath("bfloat16"),
        "float16": ModelPath("float16"),
        "text-float8": ModelPath("bfloat16", text="fused-float8"),
        "vision-float8": ModelPath("bfloat16", vision="fused-float8"),
        "vision-calibrated": ModelPath("bfloat16", vision="calibrated-float8"),
        "cache-float8": ModelPath("bfloat16", kv_dtype="float8"),
        "all-float8": ModelPath("bfloat16", "fused-float8", "calibrated-float8", "float8"),
    }
)
FLOAT32_PATHS = tuple(name for name, path in PATHS.items() if path.dtype == "float32")
REDUCED_PATHS = tuple(name for name in PATHS if name not in FLOAT32_PATHS)


def path_config(name: str, device: str) -> EngineConfig:
    """The engine's configuration for a path on "cpu" or "cuda"."""
    path = PATHS[name]
    return EngineConfig(
        device=device,
        dtype=path.dtype,
        text_backend=path.text,
        vision_backend=path.vision,
        kv_dtype=path.kv_dtype,
        cuda_graphs=path.cuda_graphs,
    )


MAX_TOKENS = 24
_MAX_OBJECTS = 4
_QUESTION = "What is the value of the tallest bar shown here?"
_OBJECT = "tallest bar"


def write_expected(folder: Path, images: Mapping[str, bytes], *, with_answers: bool = True) -> tuple[int, int]:
    """Write the images, by file name, and what the checkpoint makes of them; returns all calls and those kept.

    Without answers there are tensors alone, which is all that paths in short formats are compared with.
    """
    asked = _calls() if with_answers else []
    pictures = [Picture(name, data, _QUESTION, asked) for name, data in images.items()]
    text_only = [query_call("What is the value of the bar?"), query_call(_QUESTION)] if with_answers else []
    write_questions(folder, pictures, text_only, MAX_TOKENS)
    return record_expected(folder, EngineConfig(model=str(folder), device="cpu", dtype="float32"))


def _calls() -> list[Call]:
    refs = [[0.25, 0.75], [0.1, 0.2, 0.6, 0.9]]
    return [
        *(query_call(_QUESTION), query_call(_QUESTION, reasoning=True), query_call(_QUESTION, spatial_refs=refs)),
        *(call_of("caption", length=length) for length in ("short", "normal", "long")),
        call_of("point", object=_OBJECT, max_objects=_MAX_OBJECTS),
        call_of("detect", object=_OBJECT, max_objects=_MAX_OBJECTS),
        call_of("segment", object=_OBJECT),
        call_of("segment", object=_OBJECT, spatial_refs=refs[:1]),
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """What a path came to at one shape, over all runs."""

    shape: str
    path: str
    num_passed: int = 0
    num_failed: int = 0
    worst_share: float = 0.0
    """The largest error of a tensor as a share of its tolerance."""
    worst_case: str = ""
    """Its name, and both numbers."""
    num_bit_equal: int = 0
    """Tensors that were the same bits in all runs."""
    num_tensors: int = 0
    num_equal_answers: int = 0
    """Answers that were the same in all runs."""
    num_answers: int = 0
    complaints: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Operations whose reference in the kernel's place makes all cases pass."""
    unavailable: str = ""
    """Why the path cannot run at all at this shape, as the engine says when it starts."""
    seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        """Its cells of the table."""
        if self.unavailable:
            return self.shape, self.path, "-", "-", "-", "-", "-", f"unavailable: {self.unavailable}"
        note = "; ".join(self.complaints)
        if self.without:
            note = f"passes without {', '.join(self.without)}. {note}"
        return (
            self.shape,
            self.path,
            str(self.num_passed),
            str(self.num_failed),
            f"{self.worst_share:.3f} {self.worst_case}".strip(),
            f"{self.num_bit_equal}/{self.num_tensors}",
            f"{self.num_equal_answers}/{self.num_answers}",
            note,
        )


HEADINGS = ("shape", "path", "passed", "failed", "worst error / tolerance", "equal bits", "equal answers", "notes")


def shape_of(name: str) -> ModelShape:
    """The shape of a name: one of the hard ones, or `seed-N`. Raises ValueError."""
    if name in HARD_SHAPES:
        return HARD_SHAPES[name]
    if name.startswith(_DRAWN) and name.removeprefix(_DRAWN).isdecimal():
        return drawn_shape(int(name.removeprefix(_DRAWN)))
    raise ValueError(f"no shape {name}; there are {', '.join(HARD_SHAPES)} and {_DRAWN}N")


def write_fixture(folder: Path, shape: ModelShape, *, with_answers: bool = True) -> str:
    """Write a checkpoint of `shape`, its images and the reference's results; returns a line about them."""
    write_scaled_model(folder, shape.config, fp8_experts=shape.fp8_experts, seed=1, words=TOKENS)
    sizes = enumerate(shape.image_sizes)
    images = {
        f"image_{place}_{width}x{height}.jpg": chart(place, width, height) for place, (width, height) in sizes
    }
    num_calls, num_kept = write_expected(folder, images, with_answers=with_answers)
    return f"{shape.name}: {shape.described()}; {num_kept} of {num_calls} calls have a certain answer"


def check(folder: Path, config: EngineConfig, num_runs: int) -> list[list[Case]]:
    """All cases of so many runs. Raises `CheckpointError` where the path cannot be had."""
    fixture = ReferenceFixture(folder, config)
    return [list(fixture.cases()) for _ in range(num_runs)]


def summary(shape: str, path: str, runs: Sequence[Sequence[Case]], seconds: float) -> Row:
    """The row of a path."""
    cases = [case for run in runs for case in run]
    failed = [case for case in cases if case.complaint is not None]
    compared = [case for case in cases if case.comparison is not None]
    worst = max(compared, key=lambda case: case.comparison.share if case.comparison else 0.0, default=None)
    by_case = list(zip(*runs, strict=True))
    tensors = [same for same in by_case if same[0].comparison is not None]
    answers = [same for same in by_case if same[0].comparison is None and same[0].digest]
    return Row(
        shape,
        path,
        num_passed=len(cases) - len(failed),
        num_failed=len(failed),
        worst_share=worst.comparison.share if worst is not None and worst.comparison is not None else 0.0,
        worst_case=f"{worst.name}: {worst.comparison}" if worst is not None else "",
        num_bit_equal=_num_equal(tensors),
        num_tensors=len(tensors),
        num_equal_answers=_num_equal(answers),
        num_answers=len(answers),
        complaints=tuple(f"{case.name}: {case.complaint}" for case in failed[:_MOST_COMPLAINTS]),
        seconds=round(seconds, 1),
    )


def needed_references(operations: Iterable[str], passes: Callable[[str], bool]) -> Iterator[str]:
    """The operations for which `passes` holds, with their reference in the kernel's place."""
    for operation in operations:
        try:
            if passes(operation):
                yield operation
        except Exception as error:  # a reference may not run where its kernel does, in a captured graph for one
            print(f"with the reference of {operation}: {type(error).__name__}: {error}", file=sys.stderr)


def sweep_shape(shape: ModelShape, paths: Sequence[str], num_runs: int, device: str, num_threads: int) -> list[Row]:
    """Everything about one shape, in a process of its own or in this one."""
    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory(prefix=f"sweep-{shape.name}-") as name:
        folder = Path(name)
        with_answers = any(path in FLOAT32_PATHS for path in paths)
        print(write_fixture(folder, shape, with_answers=with_answers), file=sys.stderr, flush=True)
        return [_path_row(folder, shape.name, path, num_runs, device) for path in paths]


def _path_row(folder: Path, shape: str, path: str, num_runs: int, device: str) -> Row:
    config, started = path_config(path, device), time.perf_counter()
    try:
        row = summary(shape, path, check(folder, config, num_runs), time.perf_counter() - started)
    except CheckpointError as error:
        return Row(shape, path, unavailable=str(error))
    except Exception as error:  # whatever a kernel raises is its result
        row = Row(shape, path, num_failed=1, complaints=(f"{type(error).__name__}: {error}"[:300],))
    if not row.num_failed:
        return row

    def passes(operation: str) -> bool:
        fixture = ReferenceFixture(folder, replace(config, kernels=((operation, "reference"),), cuda_graphs=False))
        return all(case.complaint is None for _ in range(num_runs) for case in fixture.cases())

    operations = [field.name for field in fields(Kernels)] if config.text_backend != "plain" else []
    return replace(row, without=tuple(needed_references(operations, passes)))


def _num_equal(cases: Sequence[Sequence[Case]]) -> int:
    return sum(len({case.digest for case in same}) == 1 for same in cases)


def print_table(rows: Sequence[Row]) -> None:
    """One line per shape and path, in Markdown."""
    for cells in (HEADINGS, ("---",) * len(HEADINGS), *(row.cells() for row in rows)):
        print(f"| {' | '.join(cells)} |".replace("\n", " "))


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    result.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME",
        help=f"only this one: {', '.join(HARD_SHAPES)} or {_DRAWN}N; may be repeated",
    )
    result.add_argument(
        "--shapes", type=int, default=10, help="how many: the hard ones, then drawn ones (%(default)s)"
    )
    result.add_argument("--seed", type=int, default=0, help="of the first drawn shape (%(default)s)")
    result.add_argument("--runs", type=int, default=5, help="of each path at each shape (%(default)s)")
    result.add_argument(
        "--paths",
        nargs="+",
        default=["float32"],
        choices=("float32", "reduced", *PATHS),
        help="float32 and reduced are all paths of that kind (%(default)s)",
    )
    result.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="%(default)s")
    result.add_argument("--jobs", type=int, default=1, help="shapes at a time, each in a process (%(default)s)")
    result.add_argument(
        "--json",
        type=Path,
        default=Path(os.environ.get("OUT", "bench/out")) / "dimensions.json",
        help="%(default)s",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, print the table, write the JSON; 1 if a case failed."""
    options = parser()
    parsed = options.parse_args(arguments)
    drawn = range(parsed.seed, parsed.seed + max(parsed.shapes - len(HARD_SHAPES), 0))
    names = parsed.shape or [*HARD_SHAPES, *(f"{_DRAWN}{seed}" for seed in drawn)][: parsed.shapes]
    try:
        shapes = [shape_of(name) for name in names]
    except ValueError as error:
        options.error(str(error))
    device = parsed.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    groups = {"float32": FLOAT32_PATHS, "reduced": REDUCED_PATHS}
    paths = [path for choice in parsed.paths for path in groups.get(choice, (choice,))]
    paths = [path for path in dict.fromkeys(paths) if device == "cuda" or not PATHS[path].needs_cuda]
    rows = sorted(
        _rows(shapes, paths, parsed, device), key=lambda row: (names.index(row.shape), paths.index(row.path))
    )
    print_table(rows)
    facts: dict[str, Any] = {"machine": machine_facts(), "device": device, "runs": parsed.runs}
    dimensions = {shape.name: shape.described() for shape in shapes}
    write_json(parsed.json, {**facts, "shapes": dimensions, "rows": [asdict(row) for row in rows]})
    num_failed = sum(row.num_failed for row in rows)
    print(f"\n{sum(row.num_passed for row in rows)} cases passed, {num_failed} failed")
    return 1 if num_failed else 0


def _rows(
    shapes: Sequence[ModelShape], paths: Sequence[str], parsed: argparse.Namespace, device: str
) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = (paths, parsed.runs, device, max(cores // max(parsed.jobs, 1), 1))
    progress = Progress(len(shapes))
    if parsed.jobs <= 1:
        for shape in shapes:
            yield from sweep_shape(shape, *each)
            progress.end(shape.name)
        return
    with ProcessPoolExecutor(parsed.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(sweep_shape, shape, *each): shape for shape in shapes}
        for done in as_completed(running):
            yield from done.result()
            progress.end(running[done].name)


if __name__ == "__main__":
    sys.exit(main())
