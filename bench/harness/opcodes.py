"""Counts the opcodes of Python that threads execute: work of the host as a number that no other load disturbs.

The count depends on the version of Python, and a little on how requests fall into turns. Threads that are counted
are traced, which makes them many times slower.
"""

import sys
import threading
from collections import Counter, defaultdict
from types import CodeType, FrameType
from typing import Any


class Opcodes:
    """Counts opcodes by the name of the thread and by function.

    It counts this thread, and those that start before `stop`. Frames that had begun before are not counted.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self._counts: defaultdict[str, Counter[CodeType]] = defaultdict(Counter)
        threading.settrace(self._begin_thread)
        sys.settrace(self._tracer())

    def stop(self) -> None:
        """Count no more in this thread, nor in threads that start later."""
        threading.settrace(None)
        sys.settrace(None)

    def reading(self) -> dict[str, Counter[str]]:
        """Return the counts until now, by the name of the thread and that of the function."""
        found: dict[str, Counter[str]] = {}
        for thread, counts in list(self._counts.items()):
            found[thread] = Counter()
            for code, count in list(counts.items()):
                file = code.co_filename.rpartition("/")[2]
                found[thread][f"{file}:{code.co_qualname}"] += count
        return found

    def _begin_thread(self, frame: FrameType, event: str, argument: Any) -> Any:
        tracer = self._tracer()
        sys.settrace(tracer)
        return tracer(frame, event, argument)

    def _tracer(self) -> Any:
        counts = self._counts[threading.current_thread().name]

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                counts[frame.f_code] += 1
            elif frame.f_code.co_filename == __file__:
                return None
            elif event == "call":
                frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return trace

        return trace
