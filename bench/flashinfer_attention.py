"""Is attention by FlashInfer faster than by our kernels on this GPU: of prompts and of decode steps?

One layer at Moondream 2's sizes, with random values in pages of 16 of both types. Times of a layer are those of the
device, from graphs. FlashInfer's time of a decode step contains `rotary_write_kv`, which our kernel replaces. Its
plan is what the host does once a step: the time from a call with a new page table to its end, less that of a call
with the same one. Errors are relative to the definitions, for keys and values as the pages store them.

Kernels are compiled anew into a temporary folder, and loaded from it by a second process, unless `--kept`.

    python -m bench.flashinfer_attention
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness.decode_steps import AttentionInputs, Contexts
from bench.harness.output import parser_of, write_json
from bench.harness.prefill_inputs import FLOAT8, PagedAttention, Prompts
from bench.harness.timing import attempted, time_us
from bench.prefill import TINY, relative_error
from kestrel_ops import DeviceLimits, Kernels, ModelShape, TextShape, reference
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2

CHOICES = {"prefill_attention": "flashinfer", "rotary_decode_attention": "flashinfer"}
_REPEATS = 20
_NUM_PARTS = 8
"""Parts of a context in our decode kernel with one sequence; with more there is one."""


def shape_of(config: TextConfig, device: torch.device, cache_dtype: torch.dtype) -> ModelShape:
    """A bfloat16 decoder of these sizes, with pages of a type."""
    text = TextShape(
        dim=config.dim,
        ff_dim=config.ff_dim,
        num_heads=config.n_heads,
        num_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        page_size=16,
        max_batch=64,
        weight_dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
    )
    return ModelShape(device.type, DeviceLimits.of(device).capability, torch.bfloat16, text, None)


def prepared(config: TextConfig, device: torch.device) -> dict[str, float]:
    """Seconds of the import, and until the kernels for each type of pages are compiled or loaded."""
    seconds = {}
    started = time.perf_counter()
    importlib.import_module("flashinfer")
    seconds["import"] = time.perf_counter() - started
    for dtype in (torch.bfloat16, FLOAT8):
        started = time.perf_counter()
        # Without a model nothing but the name is checked: a failure is then that of the library.
        Kernels.select(device.type, CHOICES).prepare(shape_of(config, device, dtype))
        seconds[_name(dtype)] = time.perf_counter() - started
    return seconds


def with_new_tables_us(call: Callable[[], object], renew: Callable[[], None]) -> float:
    """Median of how much longer a call takes with a new page table than with the same one."""

    def measured(*, is_new: bool) -> float:
        times = []
        for _ in range(_REPEATS):
            if is_new:
                renew()
            _synchronise()
            started = time.perf_counter()
            call()
            _synchronise()
            times.append((time.perf_counter() - started) * 1e6)
        return statistics.median(times)

    call()
    return measured(is_new=True) - measured(is_new=False)


def prefill_rows(
    config: TextConfig, prompts: Prompts, device: torch.device, page_dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Whole prompts with a picture, and what follows the picture."""
    ours, theirs = Kernels.select(device.type, {}), Kernels.select(device.type, CHOICES)
    for what, start in (("prompts", 0), ("behind the picture", prompts.prefix_length)):
        torch.manual_seed(1)
        inputs = PagedAttention(config, prompts, device, page_dtype, start)
        inputs.write(ours.rotary_write_kv)

        def renew(inputs: PagedAttention = inputs) -> None:
            inputs.plan = replace(inputs.plan, page_table=inputs.plan.page_table.clone())

        plan = inputs.plan
        wanted = reference.invariant_attention(
            *(inputs.heads[0], *inputs.pages, plan.page_table, plan.query_starts, plan.lengths),
            *(plan.visible_until, plan.max_chunk, *inputs.scales),
        )
        calls = [partial(inputs.attend, kernels.prefill_attention) for kernels in (ours, theirs)]
        errors = [relative_error(call(), wanted) for call in calls]
        times = [time_us([call]) for call in calls]
        plan_us = with_new_tables_us(calls[1], renew)
        yield _row(f"{prompts.count} {what}", page_dtype, times, plan_us, errors)


def decode_row(
    config: TextConfig, contexts: Contexts, device: torch.device, page_dtype: torch.dtype
) -> dict[str, Any]:
    """A new token of each sequence."""
    ours, theirs = Kernels.select(device.type, {}), Kernels.select(device.type, CHOICES)
    cache = contexts.filled_cache(replace(config, n_layers=1), device, page_dtype)
    num_parts = _NUM_PARTS if contexts.batch == 1 else 1

    def new_inputs() -> AttentionInputs:
        torch.manual_seed(2)
        return AttentionInputs(config, contexts, cache, torch.bfloat16, num_parts)

    def attended(operation: Callable[..., Any]) -> Tensor:
        return new_inputs().run(operation)[0].clone()

    wanted = attended(reference.rotary_decode_attention)
    errors = [relative_error(attended(each.rotary_decode_attention), wanted) for each in (ours, theirs)]
    inputs = new_inputs()
    times = [time_us([lambda each=each: inputs.run(each.rotary_decode_attention)]) for each in (ours, theirs)]

    def renew() -> None:
        inputs.page_table = inputs.page_table.clone()

    plan_us = with_new_tables_us(lambda: inputs.run(theirs.rotary_decode_attention), renew)
    return _row(f"{contexts.batch} tokens", page_dtype, times, plan_us, errors)


def _row(
    what: str, page_dtype: torch.dtype, times: list[float], plan_us: float, errors: list[float]
) -> dict[str, Any]:
    row = {"what": what, "pages": _name(page_dtype), "ours_us": times[0], "flashinfer_us": times[1]}
    row |= {"plan_us": plan_us, "ours_error": errors[0], "flashinfer_error": errors[1]}
    print(
        f"{what:<24}{row['pages']:<10}{times[0]:>10.1f}{times[1]:>12.1f}{plan_us:>10.0f}"
        f"{errors[0]:>12.1e}{errors[1]:>12.1e}",
        flush=True,
    )
    return row


def _name(dtype: torch.dtype) -> str:
    return "float8" if dtype == FLOAT8 else "bfloat16"


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _own_folder(*, is_kept: bool) -> Iterator[None]:
    """Has FlashInfer keep its kernels in a temporary folder, unless those that are kept are wanted."""
    if is_kept:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="kestrel-flashinfer-") as folder:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = folder
        yield


@torch.inference_mode()
def main() -> int:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--kept", action="store_true", help="use the kernels that FlashInfer has kept")
    parser.add_argument(
        "--only-prepare", action="store_true", help="print the seconds of the import and the kernels"
    )
    parser.add_argument("--tiny", action="store_true", help="a few values, to see that it runs")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = TINY if arguments.tiny else MOONDREAM_2.text
    if arguments.only_prepare:
        print(json.dumps(prepared(config, device)))
        return 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "rows": []}
    with _own_folder(is_kept=arguments.kept):
        result["first_s"] = prepared(config, device)
        if not arguments.kept:
            command = [sys.executable, "-m", "bench.flashinfer_attention", "--only-prepare"]
            again = subprocess.run([*command, "--device", arguments.device], capture_output=True, check=True)
            result["kept_s"] = json.loads(again.stdout.splitlines()[-1])
        print(f"{name}, torch {torch.__version__}, seconds: first {result['first_s']}, kept {result.get('kept_s')}")
        print(f"\n{'a layer, µs':<34}{'ours':>10}{'FlashInfer':>12}{'its plan':>10}{'error':>12}{'its':>12}")
        prompt = Prompts(1, 40, 26) if arguments.tiny else Prompts(1, 746, 730)
        shortest, longest = (20, 40) if arguments.tiny else (746, 1002)
        for page_dtype in (torch.bfloat16, FLOAT8):
            for count in arguments.batches:
                with attempted(f"{count} prompts, {_name(page_dtype)} pages"):
                    result["rows"] += prefill_rows(config, replace(prompt, count=count), device, page_dtype)
                with attempted(f"{count} tokens, {_name(page_dtype)} pages"):
                    result["rows"].append(
                        decode_row(config, Contexts(count, shortest, longest), device, page_dtype)
                    )
    folder = Path(os.environ.get("OUT", "bench/out"))
    write_json(folder / "flashinfer.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
