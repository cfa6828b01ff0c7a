"""A server of a stated capacity: gRPC and all that is not the engine are real, the engine computes nothing.

It takes requests in the order in which they come, at most eight at a time, as steps of a GPU do, and answers them
together. A step takes as long as one H200 takes in float8 for so many new images of nine crops, times a factor
(`bench/results/details.md`); a request about a known image takes a fifteenth of a new one. Steps follow each other
in planned time: a late processor delays messages but not the next step, so that many servers on few processors have
the capacity that they are said to have.

    python -m bench.harness.delayed_server 50
"""

import asyncio
import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput, Started, TextChannel, TextDelta, Usage
from kestrel_runtime.api.requests import Query, Request
from tests.fakes import TIMING, FakeEngine

MAX_AT_ONCE = 8
STEP_S, NEW_S, KNOWN_S, ANSWER_S = 1.5e-3, 9.3e-3, 0.62e-3, 2.5e-3
"""A step, each request in it, and the tokens after it, which delay no other step."""
_NUM_TOKENS = 3


@dataclass(frozen=True, slots=True)
class _Waiting:
    arrived_s: float
    work_s: float
    is_answered: asyncio.Event


class Device:
    """Answers requests in steps. `time` and `call_at` are those of an event loop."""

    def __init__(
        self, factor: float, time: Callable[[], float], call_at: Callable[[float, Callable[[], None]], object]
    ) -> None:
        self._factor = factor
        self._time = time
        self._call_at = call_at
        self._waiting: deque[_Waiting] = deque()
        self._free_s = 0.0
        self._is_busy = False

    def submit(self, work_s: float) -> asyncio.Event:
        """Take in a request with so much work; the event is set when it is answered."""
        request = _Waiting(self._time(), work_s, asyncio.Event())
        self._waiting.append(request)
        if not self._is_busy:
            self._begin()
        return request.is_answered

    def _begin(self) -> None:
        self._is_busy = True
        start_s = max(self._free_s, self._waiting[0].arrived_s)
        step: list[_Waiting] = []
        while self._waiting and len(step) < MAX_AT_ONCE and self._waiting[0].arrived_s <= start_s:
            step.append(self._waiting.popleft())
        self._free_s = start_s + self._factor * (STEP_S + sum(request.work_s for request in step))
        for request in step:
            self._call_at(self._free_s + self._factor * ANSWER_S, request.is_answered.set)
        self._call_at(self._free_s, self._end)

    def _end(self) -> None:
        self._is_busy = False
        if self._waiting:
            self._begin()


async def serve(factor: float) -> None:
    """Until a signal."""
    loop = asyncio.get_running_loop()
    device, known = Device(factor, loop.time, loop.call_at), set[bytes]()

    def script(request: Request) -> Iterable[object]:
        assert isinstance(request, Query)
        assert isinstance(request.image, bytes)
        digest = hashlib.sha256(request.image).digest()
        is_known = digest in known
        known.add(digest)
        yield Started(Usage(746, 729))
        yield device.submit(KNOWN_S if is_known else NEW_S)
        yield TextDelta("kestrel", TextChannel.ANSWER, 0, _NUM_TOKENS)
        usage = Usage(746, 729, _NUM_TOKENS, 730 if is_known else 0)
        yield Finished(QueryOutput("kestrel", None), FinishReason.LENGTH, usage, TIMING)

    engine = FakeEngine(script, max_queued_requests=100_000)
    await Server(engine, ServerConfig(port=0, withdrawal_delay=0.0)).serve()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
