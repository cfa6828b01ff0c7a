"""The end of a process whose threads may not end: one hangs on a device, another in a decoder. Knows no server.

At its usual end Python waits for its threads and then tears down what they may still use. Both can hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from typing import NoReturn

_STANDARD_ERROR = 2


def end_within(timeout_s: float) -> None:
    """Unless the process has ended by then, print where each of its threads is, and exit with status 1.

    That happens in a thread of faulthandler's own, which does not need the interpreter's lock. Calling it again
    begins anew.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STANDARD_ERROR)


def end_now(status: int) -> NoReturn:
    """Exit without waiting for any thread. What was logged and printed is written first."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or nothing takes it any more
            stream.flush()
    os._exit(status)
