"""`kestrel-grpc serve` whose engine thread meets a fault: run as a program, with the fault's name first.

The fault strikes when a request with the seed `SEED` has generated a few tokens, so that no warm-up meets it.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

from kestrel_grpc.__main__ import main
from kestrel_runtime.scheduling.scheduler import Scheduler

SEED = 13
_NUM_TOKENS = 5


def _hang() -> None:
    threading.Event().wait()


def _exit() -> None:
    raise SystemExit


def _interrupt() -> None:
    raise KeyboardInterrupt


def _hang_on_the_device() -> None:
    import torch

    torch.cuda._sleep(2**62)  # a kernel that counts cycles, for a century
    torch.cuda.current_stream().synchronize()


FAULTS: dict[str, Callable[[], None]] = {
    "hang": _hang,
    "hang on the device": _hang_on_the_device,
    "SystemExit": _exit,
    "KeyboardInterrupt": _interrupt,
}


def _strike(fault: Callable[[], None]) -> None:
    complete = Scheduler.complete

    def faulty(self: Scheduler, step: Any, batch: Any, tokens: Any, now: float = 0.0) -> Any:
        if any(
            sequence.request.seed == SEED and sequence.num_generated >= _NUM_TOKENS for sequence in batch.sampled
        ):
            fault()
        return complete(self, step, batch, tokens, now)

    Scheduler.complete = faulty


if __name__ == "__main__":
    _strike(FAULTS[sys.argv[1]])
    sys.exit(main(["serve", *sys.argv[2:]]))
