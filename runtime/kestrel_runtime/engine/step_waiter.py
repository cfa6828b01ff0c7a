"""Waits for the device in another thread, so that the engine thread can wait for it and for requests at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol


class DeviceEvent(Protocol):
    """Marks a place in the work of a device, as `torch.cuda.Event` does."""

    def synchronize(self) -> None:
        """Waits until the device has reached it. May raise an error of the device."""
        ...


class StepWaiter:
    """Calls what it is given when the device has reached an event, in its own thread, one after the other."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[DeviceEvent | None, Callable[[], None]] | None] = SimpleQueue()
        self._has_started = False

    def call_after(self, event: DeviceEvent | None, callback: Callable[[], None]) -> None:
        """Calls back after an event and after all earlier calls; None is an event that is over."""
        if not self._has_started:
            self._has_started = True
            threading.Thread(target=self._run, name="kestrel-step-waiter", daemon=True).start()
        self._asked.put((event, callback))

    def stop(self) -> None:
        """Ends the thread, after the calls that it was asked for."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            event, callback = asked
            with suppress(Exception):  # the engine thread gets it again when it takes the tokens
                if event is not None:
                    event.synchronize()
            callback()
            del asked, event, callback
