"""Does the attention of prompts with one picture take longer than in another checkout, and has it the same bits?

One layer at Moondream 2's sizes, random values of one seed, on the same tensors, by the kernel of the other
checkout and by this one's. Graphs of both are replayed in turns, in an order that changes. A ratio is the median
over the turns of this kernel's time over the other's in the same turn.

    python -m bench.one_picture --before /tmp/before
"""

import hashlib
import importlib.util
import inspect
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench.harness.output import parser_of, write_json
from bench.harness.prefill_inputs import FLOAT8, PagedAttention, Prompts
from bench.harness.timing import turns_us
from bench.prefill import TINY
from kestrel_ops.attention import triton_prefill_attention
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2

BEFORE = "before"
NOW = "now"
_MODULE = Path("kernels", "kestrel_ops", "attention", "triton_prefill_attention.py")
_STARTS = {"prompts": 0, "behind the picture": 730}


def attention_of(tree: Path) -> ModuleType:
    """The module of the kernel in another checkout; what it imports is this one's."""
    name = "attention_of_the_other_checkout"
    spec = importlib.util.spec_from_file_location(name, tree.resolve() / _MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


def attention(module: ModuleType, inputs: PagedAttention, prefix_length: int) -> Callable[[], Tensor]:
    """A call that launches the kernel of a module and nothing else.

    Modules before conversations take the length of each prompt's prefix in place of each row's view.
    """
    plan = inputs.plan
    views = plan.visible_until
    if "prefix_lengths" in inspect.signature(module.prefill_attention).parameters:
        views = torch.full_like(plan.lengths, prefix_length)
    chunks = (plan.page_table, plan.query_starts, plan.lengths, views, plan.max_chunk)
    return partial(module.prefill_attention, *inputs.heads, *inputs.pages, *chunks, *inputs.scales)


def cases(counts: list[int], device: torch.device, *, is_tiny: bool) -> Iterator[tuple[str, int, PagedAttention]]:
    """Name, length of the prefix and inputs of each case."""
    config = TINY if is_tiny else MOONDREAM_2.text
    for page_dtype in (torch.bfloat16, FLOAT8):
        for count in counts:
            prompts = Prompts(count, 40, 26) if is_tiny else Prompts(count, 746, 730)
            for what, start in _STARTS.items():
                torch.manual_seed(7)
                inputs = PagedAttention(config, prompts, device, page_dtype, min(start, prompts.prefix_length))
                pages = "float8" if page_dtype == FLOAT8 else "bfloat16"
                yield f"{count} {what}, {pages} pages", prompts.prefix_length, inputs


def compared(calls: dict[str, Callable[[], Tensor]], turns: int) -> dict[str, Any]:
    """Times of both calls, their ratio with its quartiles, and whether their results have the same bits."""
    digests = {
        hashlib.sha256(call().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for call in calls.values()
    }
    times = turns_us(calls, turns)
    ratios = sorted(now / before for now, before in zip(times[NOW], times[BEFORE], strict=True))
    return {
        **{f"{name}_us": statistics.median(own) for name, own in times.items()},
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "has_same_bits": len(digests) == 1,
    }


def main() -> int:
    """Measure in turns, print, and write; 1 if a result has other bits."""
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a few values, to see that it runs")
    arguments = parser.parse_args()
    modules = {BEFORE: attention_of(arguments.before), NOW: triton_prefill_attention}
    rows = []
    print(f"{'a layer, µs':<40}{'before':>9}{'now':>9}{'ratio':>8}{'quartiles':>16}  bits")
    with torch.inference_mode():
        device = torch.device(arguments.device)
        for case, prefix_length, inputs in cases(arguments.prompts, device, is_tiny=arguments.tiny):
            calls = {name: attention(module, inputs, prefix_length) for name, module in modules.items()}
            row = {"case": case} | compared(calls, arguments.turns)
            low, high = row["quartiles"]
            print(
                f"{case:<40}{row['before_us']:>9.2f}{row['now_us']:>9.2f}{row['ratio']:>8.3f}{low:>9.3f}{high:>7.3f}"
                f"  {'the same' if row['has_same_bits'] else 'OTHERS'}",
                flush=True,
            )
            rows.append(row)
    write_json(Path(os.environ.get("OUT", "bench/out")) / "one-picture.json", {"rows": rows})
    return 0 if all(row["has_same_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
