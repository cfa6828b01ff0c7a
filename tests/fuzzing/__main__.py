"""`python -m tests.fuzzing CPU_SECONDS`: draw for images, requests, triton, adapters and frames, a fifth each.

Names of these behind the seconds choose among them: `python -m tests.fuzzing 600 images`. Every run draws anew.
Prints what came out how often; stops at the first thing that must not be, and shows it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzzing import UNHURRIED
from tests.fuzzing.adapter_uploads import upload, uploads
from tests.fuzzing.frames import Target, conversations
from tests.fuzzing.images import decode, images
from tests.fuzzing.infer_requests import infer, infer_requests
from tests.fuzzing.requests import methods, parse, requests

_BATCH = 500
_MIB = 2**20


def main() -> None:
    """Run all five, or those that are named."""
    names = sys.argv[2:] or ["images", "requests", "triton", "adapters", "frames"]
    cpu_s = float(sys.argv[1]) / len(names)
    if "images" in names:
        _draw("images", images, decode, cpu_s, clock=time.thread_time)
    if "requests" in names:
        asked = st.sampled_from(methods()).flatmap(lambda method: st.tuples(st.just(method), requests(method)))
        _draw("requests", asked, lambda call: parse(*call), cpu_s)
    if "triton" in names:
        _draw("triton", infer_requests, infer, cpu_s)
    if "adapters" in names:
        _draw("adapters", uploads, upload, cpu_s)
    if "frames" in names:
        with Target.running() as target:
            _draw("frames", conversations, target.hear, cpu_s, others_cpu_s=lambda: target.server.cpu_s)
            target.assert_well()
            print(f"  the server has {target.server.rss_bytes / _MIB:.0f} MiB, and answers", flush=True)


def _draw(
    name: str,
    strategy: st.SearchStrategy[Any],
    check: Callable[[Any], str],
    cpu_s: float,
    *,
    others_cpu_s: Callable[[], float] = lambda: 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """`clock` times each; work that never waits is timed by its own CPU time, independent of the machine's load."""
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0

    @settings(max_examples=_BATCH, database=None, deadline=None, derandomize=False, suppress_health_check=UNHURRIED)
    @given(strategy)
    def one(drawn: Any) -> None:
        nonlocal slowest_s
        began = clock()
        outcomes[check(drawn)] += 1
        slowest_s = max(slowest_s, clock() - began)

    began = time.process_time() + others_cpu_s()
    used_s = 0.0
    while used_s < cpu_s:
        one()
        used_s = time.process_time() + others_cpu_s() - began
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
    print(
        f"{name}: {outcomes.total():,} in {used_s:.0f} s of CPU, the slowest {slowest_s:.2f} s: {told}", flush=True
    )


if __name__ == "__main__":
    main()
