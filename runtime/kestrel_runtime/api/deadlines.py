"""Defines deadlines: moments of the monotonic clock, which all processes of a host share.

A frontend makes the deadline of a call once, from the time that its caller leaves it (`deadline_in`). Each later
stage, in whatever process, gets that moment and asks `deadline_error` whether the request ends here:

    receive   calls/call_context.py        while the message arrives, and to name the outcome of a cancelled call
    submit    engine/engine.py             before the request enters the queue
    wait      engine/engine.py             by a timer, while the request waits for a worker
    prepare   engine/preprocessing.py      before a worker decodes its image, and while it does
    run       engine/loop.py               once a turn, for every request that is due (`engine/due_deadlines.py`)

Between processes the moment travels as it is (`multiprocess/protocol/messages.py`).
"""

from __future__ import annotations

import time

from kestrel_runtime.api.errors import DeadlineExceeded


def deadline_in(seconds: float | None) -> float | None:
    """Returns the moment that lies `seconds` from now, or None, which is no deadline, for None."""
    return None if seconds is None else time.monotonic() + seconds


def remaining_s(deadline: float | None, now: float | None = None) -> float | None:
    """Returns the seconds from `now` until a deadline, 0 once it has passed, or None without one.

    `now`: a moment of the monotonic clock; the present if None.
    """
    return None if deadline is None else max(0.0, deadline - (time.monotonic() if now is None else now))


def deadline_error(deadline: float | None, now: float | None = None) -> DeadlineExceeded | None:
    """Returns the error with which a request ends if its deadline has passed at `now`, else None.

    `now`: a moment of the monotonic clock; the present if None.
    """
    if deadline is None or (time.monotonic() if now is None else now) < deadline:
        return None
    return DeadlineExceeded("the deadline passed")
