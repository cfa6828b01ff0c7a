"""The command `kestrel-grpc`: runs a command of `cli/`, and ends quietly after Ctrl-C, SIGTERM or a closed pipe."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

# gRPC's core writes lines in a format of its own to standard error, and reads this variable only while it is being
# imported. Errors of calls are in their statuses; lines about clients are shown where an operator asks for them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it: 128 and the number of the signal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    is_server = words[:1] == ["serve"]
    # Before the imports, which take seconds. Without a handler SIGTERM ends the process with a status that says
    # failure, and does nothing to the first process of a container.
    before = signal.signal(signal.SIGTERM, _end) if is_server else None
    if is_server:
        gc.disable()  # imports and captures leave no garbage; the server begins with it when it is ready
    try:
        try:
            # Here, because an import takes a moment, in which Ctrl-C may be pressed too.
            from kestrel_grpc.cli.commands import run

            status = run(words)
            if argv is None and is_server:
                sys.stdout.flush()
                _leave(status)
            return status
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has closed it; without this, Python reports another error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if argv is not None and is_server:  # called by a program, which goes on
            signal.signal(signal.SIGTERM, before)
            gc.enable()


def _end(number: int, frame: FrameType | None) -> None:
    """Exit until the server handles the signal. An exception instead might be caught by a library."""
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Exit without destroying all objects of large libraries, which would take a second."""
    logging.shutdown()  # writes the lines that wait for the log's thread
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
