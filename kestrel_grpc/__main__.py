"""Runs the command `kestrel-grpc`, and ends quietly after Ctrl-C, SIGTERM or a closed pipe."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from kestrel_grpc.process.bytecode import compile_ahead, use_kept_bytecode

# gRPC's core writes lines in a format of its own to standard error, and reads this variable only while it is being
# imported. Errors of calls are in their statuses; lines about clients are shown where an operator asks for them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_OF_A_START = (
    "torch",
    "kestrel_runtime.engine.engine",
    "kestrel_grpc.multiprocess.supervision.core_process",
    "kestrel_grpc.multiprocess.engine_channel.core_server",
    "kestrel_grpc.multiprocess.supervision.frontend_process",
    "kestrel_runtime.models.moondream.*",
    "kestrel_ops.*",
    *("triton", "triton.backends.nvidia.compiler", "triton.backends.nvidia.driver", "triton.experimental.gluon"),
)
"""The modules that a server imports, with all that they import."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it: 128 and the number of the signal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    is_server = words[:1] == ["serve"]
    before = _handle_signals() if is_server else {}
    if is_server:
        gc.disable()  # imports and captures leave no garbage; the server begins with it when it is ready
    try:
        try:
            if is_server and argv is None:
                compile_ahead(_OF_A_START)
                use_kept_bytecode()
            # Imported within the `try`: Ctrl-C may be pressed during the import too.
            from kestrel_grpc.process.terminal import open_standard_streams

            open_standard_streams()
            from kestrel_grpc.cli.commands import run

            status = run(words)
            if argv is None and is_server:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                _leave(status)
            return status
        finally:
            sys.stdout.flush()
    except OSError as error:
        from kestrel_grpc.process.resources import missing_resource
        from kestrel_grpc.process.terminal import print_error

        want = missing_resource(error)
        if not isinstance(error, BrokenPipeError) and (want is None or error.filename is not None):
            raise
        # Without this, Python reports another error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if want is not None:  # otherwise its reader has closed it on purpose
            print_error(f"the output cannot be written: {want}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if argv is not None and is_server:  # called by a program that continues
            for number, handler in before.items():
                signal.signal(number, handler)
            gc.enable()


def _handle_signals() -> dict[signal.Signals, Any]:
    """Handles signals until the server does, before the imports, which take seconds. Returns the handlers of
    before.

    Without a handler SIGTERM ends the process with a status that says failure, and does nothing to the first
    process of a container. SIGHUP ends it only if its terminal is gone, and not if it was started to ignore
    it.
    """
    had_terminal = os.isatty(0)

    def hang_up(number: int, frame: FrameType | None) -> None:
        if had_terminal and not os.isatty(0):
            _leave(128 + number)

    handlers: dict[signal.Signals, Any] = {signal.SIGTERM: _end}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = hang_up
    # A terminal may stop jobs in its background that write to it, as a server does that is started with `&`.
    handlers[signal.SIGTTOU] = signal.SIG_IGN
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _end(number: int, frame: FrameType | None) -> None:
    """Exits at a signal that arrives before the server handles it. An exception might be caught by a library."""
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Exits without destroying all objects of large libraries, which would take a second."""
    logging.shutdown()  # writes the lines that wait for the log's thread
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
