"""Runs work of the server, such as returning memory, while it is idle or after a maximum interval."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from kestrel_grpc.calls.call_context import CallContext, Outcome
from kestrel_runtime.api.engine import Engine

REST_S = 1.0
"""A server is idle when no call has ended for this long and the engine has no request."""
INTERVAL_S = 30.0
"""The shortest time between two runs."""
MAX_INTERVAL_S = 300.0
"""After this long the work runs even if the server has never been idle."""

_log = logging.getLogger(__name__)


class Maintenance:
    """Runs `work` in its own thread when calls have ended and the server is idle, or `max_interval_s` has passed.

    Without calls since the last run there is no next run. Exceptions of the work are logged. Belongs to the event
    loop that it was made on. Times are in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        work: Callable[[], object],
        *,
        rest_s: float = REST_S,
        interval_s: float = INTERVAL_S,
        max_interval_s: float = MAX_INTERVAL_S,
    ) -> None:
        self._engine = engine
        self._work = work
        self._rest_s, self._interval_s, self._max_interval_s = rest_s, interval_s, max_interval_s
        self._loop = asyncio.get_running_loop()
        self._earliest = self._rests_at = self._loop.time()
        self._latest = self._earliest + max_interval_s
        self._timer: asyncio.TimerHandle | None = None

    def note(self, call: CallContext, outcome: Outcome) -> None:
        """Records the end of a call."""
        self._rests_at = self._loop.time() + self._rest_s
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._rests_at, self._earliest), self._look)

    def close(self) -> None:
        """Starts no more work."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now < self._latest:
            if now < self._rests_at:
                self._timer = self._loop.call_at(self._rests_at, self._look)
                return
            load = self._engine.load()
            if load.num_running or load.num_waiting or load.num_preprocessing:
                return  # the end of its calls will be recorded here
        self._earliest, self._latest = now + self._interval_s, now + self._max_interval_s
        # Not a thread of the event loop's pool, which would live on although there is rarely any work.
        threading.Thread(target=self._do, name="kestrel-maintenance", daemon=True).start()

    def _do(self) -> None:
        try:
            self._work()
        except Exception:  # a bug in the work must not end the server
            _log.exception("maintenance failed")
