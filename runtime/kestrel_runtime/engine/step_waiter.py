"""Waits for steps in another thread, so that the engine thread can wait for a step and for requests at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from kestrel_runtime.scheduling.page_manager import StepId


class Event(Protocol):
    """Marks the end of a step on its device, as `torch.cuda.Event` does."""

    def synchronize(self) -> None:
        """Waits for it. May raise an error of the device."""
        ...


class StepWaiter:
    """Calls `on_end` with the id of each step that it was asked to wait for, in its own thread."""

    def __init__(self, on_end: Callable[[StepId], None]) -> None:
        self._on_end = on_end
        self._asked: SimpleQueue[tuple[StepId, Event | None] | None] = SimpleQueue()
        self._has_started = False

    def wait_for(self, step: StepId, end: Event | None) -> None:
        """Waits for a step after those it was asked for before; one without an event has ended."""
        if not self._has_started:
            self._has_started = True
            threading.Thread(target=self._run, name="kestrel-step-waiter", daemon=True).start()
        self._asked.put((step, end))

    def stop(self) -> None:
        """Ends the thread, after the steps that it was asked for."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            step, end = asked
            with suppress(Exception):  # the engine thread gets it again when it takes the tokens
                if end is not None:
                    end.synchronize()
            del asked, end
            self._on_end(step)
