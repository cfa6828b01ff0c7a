"""Keeps the open streams and the pending removals of cached content, which callers wait for.

All of them end with the engine, whatever state the loop's books are in.

A stream is kept from before its request is queued until it is over. An entry holds nothing else, so no fault in
preprocessing, in the queue or in the engine thread can make it wrong.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

from kestrel_runtime.api.engine import ClearedCache
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.scheduling.sequence import TokenSequence

_NUM_REMEMBERED = 256
"""The removals that are kept, to apply them to requests that were still being prepared at the time."""


class OpenStreams:
    """A set of streams, by event loop. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[Hashable, set[Stream]] = {}
        self._is_closed = False

    def add(self, stream: Stream) -> None:
        """Keep a stream until it is over, on its own event loop. Raises `EngineUnavailable` after `close`."""
        with self._lock:
            if self._is_closed:
                raise EngineUnavailable("the engine has stopped")
            of_loop = self._streams.get(stream.loop)
            if of_loop is None:
                # Streams of an event loop that is closed are never over.
                self._streams = {
                    loop: streams
                    for loop, streams in self._streams.items()
                    if any(not item.loop.is_closed() for item in list(streams))
                }
                of_loop = self._streams[stream.loop] = set()
            of_loop.add(stream)
        stream.open_streams = of_loop

    def of(self, loop: Hashable) -> list[Stream]:
        """Returns the streams of an event loop."""
        with self._lock:
            return list(self._streams.get(loop, ()))

    def close(self) -> None:
        """End every stream with `EngineUnavailable` and accept no more. Events posted earlier arrive first."""
        with self._lock:
            self._is_closed = True
            streams = [stream for of_loop in self._streams.values() for stream in list(of_loop)]
        for stream in streams:
            stream.fail(EngineUnavailable("the engine has stopped"))


class _Clearing(NamedTuple):
    namespace: str | None
    image: bytes | None
    done: Future[ClearedCache]
    asked: float
    """The time in seconds of the monotonic clock."""


class CacheClearings:
    """Pending removals, in the order of the requests. Every future is resolved, also after `close`."""

    def __init__(self) -> None:
        self._waiting: deque[_Clearing] = deque()
        self._carried_out: deque[_Clearing] = deque(maxlen=_NUM_REMEMBERED)
        self._is_closed = False

    def add(self, namespace: str | None, image: bytes | None) -> Future[ClearedCache]:
        """Ask for a removal. The future fails with `EngineUnavailable` if the engine ends first."""
        clearing = _Clearing(namespace, image, Future(), time.monotonic())
        self._waiting.append(clearing)
        if self._is_closed:  # maybe just now, and then `carry_out` is not called again
            self.close()
        return clearing.done

    @property
    def pending(self) -> bool:
        """True if a removal waits."""
        return bool(self._waiting)

    def carry_out(self, forget: Callable[[str | None, bytes | None], ClearedCache]) -> None:
        """Has `forget` remove each namespace, or image of a namespace. Runs in the engine thread."""
        while self._waiting:
            clearing = self._waiting[0]  # it stays queued: if this raises, `close` resolves it
            removed = forget(clearing.namespace, clearing.image)
            self._carried_out.append(clearing)
            with contextlib.suppress(InvalidStateError):  # the caller has cancelled it
                clearing.done.set_result(removed)
            with contextlib.suppress(IndexError):  # `close` has emptied the queue meanwhile
                self._waiting.popleft()

    def apply_to(self, sequence: TokenSequence) -> None:
        """Keeps a sequence from publishing what was removed after its request came. Runs in the engine thread."""
        if self._concern(sequence):
            sequence.leave_caches()

    def _concern(self, sequence: TokenSequence) -> bool:
        """Returns True if a later removal concerns the sequence, or if there were too many to know."""
        num_later = 0
        for clearing in reversed(self._carried_out):
            if clearing.asked < sequence.submitted:
                return False
            if sequence.belongs_to(clearing.namespace, clearing.image):
                return True
            num_later += 1
        return num_later == _NUM_REMEMBERED

    def close(self) -> None:
        """Refuses all that waits and will arrive, once the engine thread has ended or hangs. For any thread."""
        self._is_closed = True
        while self._waiting:
            with contextlib.suppress(IndexError, InvalidStateError):
                self._waiting.popleft().done.set_exception(EngineUnavailable("the engine has stopped"))
