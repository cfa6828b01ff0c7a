"""Starts and ends a process of a front end or of an engine core.

The supervisor runs `python -m kestrel_grpc.multiprocess.supervision core DESCRIPTOR` (or `frontend`), with the
descriptor of a socket.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import NoReturn

from kestrel_grpc.process.bytecode import use_kept_bytecode
from kestrel_grpc.process.libraries import load_torch_libraries


def run() -> NoReturn:
    """Run the process that the first argument names; `main` of its module reads the second one."""
    use_kept_bytecode()
    gc.disable()  # imports and captures leave no garbage; it begins when the process is ready
    if sys.argv.pop(1) == "core":
        libraries = load_torch_libraries()
        from kestrel_grpc.multiprocess.supervision import core_process

        main = partial(core_process.main, libraries)
    else:
        from kestrel_grpc.multiprocess.supervision.frontend_process import main
    from kestrel_grpc.process.exit import end_now
    from kestrel_grpc.process.resources import missing_resource
    from kestrel_grpc.telemetry.logs import report

    try:
        status = main()
    except (OSError, MemoryError) as error:
        if (want := missing_resource(error)) is None:
            raise
        report(f"the system does not give what a process of the server needs: {want}")
        status = 1
    # To destroy all objects of large libraries would take as long as a quarter of the start.
    end_now(status)


if __name__ == "__main__":
    run()
