"""Does the attention of prompts with one picture take longer than in another checkout, and has it the same bits?

Processes of both trees run in turns, A B A B, each with the kernels, the inputs and the clock of its own tree: one
layer at Moondream 2's sizes, random values of one seed, times of the device from graphs. A ratio is the median over
the rounds of this tree's time over the other's in the same round.

    python -m bench.one_picture --before /tmp/before
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

# Of the tree that is on the path: what is used of them is alike in both.
import kestrel_ops
from bench.harness.output import write_json
from bench.harness.prefill_inputs import FLOAT8, PagedAttention, Prompts
from bench.harness.timing import time_us
from bench.prefill import TINY
from kestrel_ops import Kernels
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2

HERE = Path(__file__).resolve()
_STARTS = {"prompts": 0, "behind the picture": 730}


def measured(counts: list[int], device: torch.device, tree: str, *, is_tiny: bool) -> dict[str, dict[str, Any]]:
    """Times in µs and digests of the results, by case, with the modules of the tree that is on the path."""
    assert Path(kestrel_ops.__file__).is_relative_to(tree), "the modules of another tree"
    kernels = Kernels.select(device.type, {})
    config = TINY if is_tiny else MOONDREAM_2.text
    found: dict[str, dict[str, Any]] = {}
    for page_dtype in (torch.bfloat16, FLOAT8):
        for count in counts:
            prompts = Prompts(count, 40, 26) if is_tiny else Prompts(count, 746, 730)
            for what, start in _STARTS.items():
                torch.manual_seed(7)
                inputs = PagedAttention(config, prompts, device, page_dtype, min(start, prompts.prefix_length))
                attended = inputs.attend(kernels.prefill_attention).contiguous()
                digest = hashlib.sha256(attended.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
                us = time_us([lambda inputs=inputs: inputs.attend(kernels.prefill_attention)], replays=31)
                pages = "float8" if page_dtype == FLOAT8 else "bfloat16"
                found[f"{count} {what}, {pages} pages"] = {"us": us, "digest": digest}
    return found


def run_in(tree: Path, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """What a process with the modules of a tree measures."""
    tree = tree.resolve()
    own = [str(tree), *(str(tree / name) for name in ("runtime", "kernels", "clients/python"))]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", str(HERE), "--measure", str(tree), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tree,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure in turns, print, and write; 1 if a result has other bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--measure", metavar="TREE", help="of one tree, as JSON; used by the command itself")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a few values, to see that it runs")
    arguments = parser.parse_args()
    if arguments.measure:
        with torch.inference_mode():
            device = torch.device(arguments.device)
            print(json.dumps(measured(arguments.prompts, device, arguments.measure, is_tiny=arguments.tiny)))
        return 0
    if arguments.before is None:
        parser.error("--before: the other checkout is needed")
    passed = ["--device", arguments.device, "--prompts", *map(str, arguments.prompts)]
    passed += ["--tiny"] * arguments.tiny
    trees = {"before": arguments.before, "now": HERE.parents[1]}
    rounds = [{name: run_in(tree, passed) for name, tree in trees.items()} for _ in range(arguments.rounds)]
    rows = []
    print(f"{'a layer, µs':<44}{'before':>10}{'now':>10}{'ratio':>8}  bits")
    for case in rounds[0]["now"]:
        before, now = ([each[name][case]["us"] for each in rounds] for name in trees)
        ratio = statistics.median([b / a for a, b in zip(before, now, strict=True)])
        digests = {each[name][case]["digest"] for each in rounds for name in trees}
        rows.append(
            {
                "case": case,
                "before_us": statistics.median(before),
                "now_us": statistics.median(now),
                "ratio": ratio,
                "has_same_bits": len(digests) == 1,
            }
        )
        bits = "the same" if len(digests) == 1 else "OTHERS"
        print(f"{case:<44}{rows[-1]['before_us']:>10.1f}{rows[-1]['now_us']:>10.1f}{ratio:>8.3f}  {bits}")
    write_json(Path(os.environ.get("OUT", "bench/out")) / "one-picture.json", {"rows": rows})
    return 0 if all(row["has_same_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
