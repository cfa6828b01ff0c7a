"""Work that waits until nobody asks anything, though not for ever. Knows when that is, not what the work does."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from kestrel_grpc.wire.call_context import CallContext, Outcome
from kestrel_runtime.api.engine import Engine

REST_S = 1.0
"""A server rests when it has had nothing to do for so long."""
INTERVAL_S = 30.0
"""At least so long lies between two turns."""
PATIENCE_S = 300.0
"""At most so long lies between two turns of a server that never rests."""

_log = logging.getLogger(__name__)


class Maintenance:
    """Does `work` in a thread of its own once calls have been made and the engine rests, or has not for too long.

    A server that nobody has called since the last turn does nothing. What the work raises is logged. Belongs to the
    event loop that it was made on. Times are in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        work: Callable[[], object],
        *,
        rest_s: float = REST_S,
        interval_s: float = INTERVAL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._engine = engine
        self._work = work
        self._rest_s, self._interval_s, self._patience_s = rest_s, interval_s, patience_s
        self._loop = asyncio.get_running_loop()
        self._earliest = self._rests_at = self._loop.time()
        self._latest = self._earliest + patience_s
        self._timer: asyncio.TimerHandle | None = None

    def note(self, call: CallContext, outcome: Outcome) -> None:
        """A call has ended."""
        self._rests_at = self._loop.time() + self._rest_s
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._rests_at, self._earliest), self._look)

    def close(self) -> None:
        """Start no more work."""
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
                return  # the calls that wait for it will end, and be noted
        self._earliest, self._latest = now + self._interval_s, now + self._patience_s
        # Not the loop's own threads, which stay: most of the time there is nothing to do.
        threading.Thread(target=self._do, name="kestrel-maintenance", daemon=True).start()

    def _do(self) -> None:
        try:
            self._work()
        except Exception:  # our own bug, and no reason for a server to end
            _log.exception("maintenance failed")
