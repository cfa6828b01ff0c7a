"""Ends a process whose threads may hang.

At a normal exit Python waits for the threads and then destroys what they may still use. A thread may hang, for
example in a device call or an image decoder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from typing import NoReturn

END_TIMEOUT_S = 20.0
"""The time in which a process must end once its engine is closed or dead. Normally that takes a few seconds."""
_STANDARD_ERROR = 2


def end_within(timeout_s: float) -> None:
    """Prints the stack of every thread and exits with status 1, unless the process has ended within `timeout_s`
    seconds.

    A thread of faulthandler does so, which does not need the interpreter's lock. Calling this again restarts the
    time.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STANDARD_ERROR)


def end_now(status: int) -> NoReturn:
    """Exits without waiting for any thread. Logged and printed text is written first."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
    os._exit(status)
