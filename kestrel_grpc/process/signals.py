"""Handles the signals by which a terminal, a shell or a service manager asks a process to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

_STANDARD_INPUT = 0
_TERMINAL_CLOSES_S = 2.0
"""The time within which a terminal closes after the SIGHUP of its shell, in seconds."""

_log = logging.getLogger(__name__)


class StopSignals:
    """Holds futures for the first and the second request to stop.

    SIGHUP is the first request if standard input was a terminal that is gone. Otherwise it calls `reload`.
    """

    def __init__(self, reload: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._reload = reload
        self._had_terminal = os.isatty(_STANDARD_INPUT)
        self.first: asyncio.Future[signal.Signals] = self._loop.create_future()
        self.second: asyncio.Future[signal.Signals] = self._loop.create_future()

    def note(self, number: signal.Signals) -> None:
        """Handles SIGTERM or SIGINT."""
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return

    def hang_up(self) -> None:
        """Handles SIGHUP."""
        if self._note_lost_terminal():
            return
        if self._had_terminal:  # a shell that ends sends the signal before its terminal closes
            self._loop.call_later(_TERMINAL_CLOSES_S, self._note_lost_terminal)
        self._reload()

    def _note_lost_terminal(self) -> bool:
        is_lost = self._had_terminal and not os.isatty(_STANDARD_INPUT)
        if is_lost and not self.first.done():  # the kernel and a shell may send one each: it is never the second
            _log.info("the terminal is gone")
            self.first.set_result(signal.SIGHUP)
        return is_lost


@contextlib.contextmanager
def stop_signals(reload: Callable[[], object] | None = None) -> Iterator[StopSignals]:
    """Handles SIGTERM and SIGINT on the running event loop during the `with` block.

    With `reload`, which reads files again, it handles SIGHUP too, unless the process was started to ignore it
    (`nohup`).
    """
    loop = asyncio.get_running_loop()
    signals = StopSignals(reload or (lambda: None))
    handlers: dict[signal.Signals, Callable[[], object]] = {
        number: partial(signals.note, number) for number in (signal.SIGTERM, signal.SIGINT)
    }
    if reload is not None and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = signals.hang_up
    before = {number: signal.getsignal(number) for number in handlers if number is not signal.SIGINT}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield signals
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
        # Removing leaves the default, with which a signal would be a failure while the process ends.
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Interruption:
    """Records the first SIGINT or SIGTERM during a `with` block without an event loop, whose work reads `number`.

    A SIGINT after that raises KeyboardInterrupt. A second SIGTERM does nothing: `timeout` sends it to a process and
    to its group, so it arrives twice. Outside the main thread, where Python has no signals, nothing is recorded.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
