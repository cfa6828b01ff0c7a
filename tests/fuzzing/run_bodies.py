"""`python -m tests.fuzzing.run_bodies NUMBER`: so many hostile conversations with each API over HTTP."""

import sys
import time

from tests.fuzzing.bodies import PATHS, target

_MIB = 2**20
_WARM_UP = 500


def main() -> None:
    """Have all conversations with one server after the other, and print outcomes and memory."""
    number = int(sys.argv[1])
    for api in PATHS:
        with target() as server:
            server.hear_all(api, range(_WARM_UP))
            began, before = time.monotonic(), server.rss_bytes
            outcomes = server.hear_all(api, range(_WARM_UP, _WARM_UP + number))
            after, took_s = server.rss_bytes, time.monotonic() - began
        told = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
        print(
            f"{api}: {number:,} in {took_s:.0f} s, memory {before / _MIB:.0f} to {after / _MIB:.0f} MiB: {told}",
            flush=True,
        )


if __name__ == "__main__":
    main()
