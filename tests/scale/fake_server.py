"""A server over a fake engine in a process of its own, to be killed, stopped and started again.

Every answer is the name of the server. `BUSY` reports a higher load than the others. A question that begins with
"hold" is held before its end, or before its beginning where it is `HOLD_ALL`, until the server gets SIGUSR1. The
server prints each question when it comes.

    python -m tests.scale.fake_server NAME PORT
"""

import asyncio
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.engine import Load
from kestrel_runtime.api.events import (
    Finished,
    FinishReason,
    QueryOutput,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    Usage,
)
from kestrel_runtime.api.requests import Query, Request
from tests.fakes import HOLD, FakeEngine

BUSY = "A"
"""The name of a server that says that 100 requests wait."""
HOLD_ALL = "hold everything"
HOLD_END = "hold the end"
WITHDRAWAL_S = 5.0


class _Engine(FakeEngine):
    num_waiting = 0

    def load(self) -> Load:
        return replace(super().load(), num_waiting=self.num_waiting)


async def serve(name: str, port: int) -> None:
    """Until SIGTERM, which drains it."""
    usage = Usage(735, 729, 1)

    def script(request: Request) -> Iterable[object]:
        assert isinstance(request, Query)
        print(f"asked {request.question}", flush=True)
        yield from [HOLD] if request.question == HOLD_ALL else []
        yield Started(usage)
        yield TextDelta(name[:1], TextChannel.ANSWER, 0, 1)
        yield from [HOLD] if request.question == HOLD_END else []
        yield TextDelta(name[1:], TextChannel.ANSWER, 1, 1)
        yield Finished(QueryOutput(name, None), FinishReason.STOP, usage, Timing(0.0, 0.0, 0.0, 0.0, 0.0))

    engine = _Engine(script)
    engine.num_waiting = 100 if name == BUSY else 0
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.release)
    config = ServerConfig(port=port, withdrawal_delay=WITHDRAWAL_S, load_reports=True)
    await Server(engine, config).serve()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
