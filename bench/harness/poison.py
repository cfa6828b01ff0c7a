"""`kestrel-grpc` whose engine cores die in the middle of a step that has a request with the seed `SEED`.

The variable `POISON` says how: the process exits (`exit`), as after a fault of a library, or it is killed
(`SIGKILL`), as for want of memory.

    POISON=exit python -m bench.harness.poison serve --frontends 2 --devices cpu,cpu
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

SEED = 13
VARIABLE = "POISON"
WAYS = ("exit", "SIGKILL")
_EXIT_STATUS = 3


def poison_cores() -> None:
    """Have the supervisor of this process start cores that die of the poison."""
    from kestrel_grpc.multiprocess.supervision import supervisor

    vars(supervisor)["_Core"].module = "bench.harness.poison"


def _die() -> None:
    if os.environ[VARIABLE] == "exit":
        os._exit(_EXIT_STATUS)
    os.kill(os.getpid(), signal.SIGKILL)


def _run_core() -> int:
    from kestrel_grpc.multiprocess.supervision import core_process as core
    from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
    from kestrel_runtime.scheduling.batch import Batch

    launch = StepRunner.launch

    def launch_unless_poisoned(self: StepRunner, batch: Batch, after: Iterable[StepHandle] = ()) -> StepHandle:
        if any(sequence.request.seed == SEED for sequence in batch.sequences):
            _die()
        return launch(self, batch, after)

    StepRunner.launch = launch_unless_poisoned
    return core.main()


def main() -> int:
    """Run what the arguments say: a core, as the supervisor starts it, or the command."""
    if sys.argv[1] == "core":
        del sys.argv[1]
        return _run_core()
    from kestrel_grpc.__main__ import main

    poison_cores()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
