"""Runs the process of an engine core: loads the model, and serves front ends until the supervisor ends it.

`python -m kestrel_grpc.multiprocess.supervision core DESCRIPTOR` runs it (`__main__.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import generate_latest

from kestrel_grpc.calls.readiness import death_of
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.supervision.child import (
    NEW_OBJECTS_OF_CORE,
    begin,
    ended_with_supervisor,
    memory_returner,
    new_link,
)
from kestrel_grpc.multiprocess.supervision.stored_images import forget_expired_images
from kestrel_grpc.process.bytecode import keep_bytecode
from kestrel_grpc.process.exit import END_TIMEOUT_S, end_now, end_within
from kestrel_grpc.process.resources import freeze_existing_objects, loop_factory
from kestrel_grpc.telemetry.logs import report
from kestrel_grpc.telemetry.metrics import EngineReader, Reading, new_registry
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.engine.flight_record import RecordUnavailable
from kestrel_runtime.models.background_load import BackgroundLoad

if TYPE_CHECKING:
    from kestrel_runtime.engine.engine import LocalEngine

_log = logging.getLogger(__name__)


def main(torch_libraries: threading.Thread | None = None) -> int:
    """Run the process, which imports torch once this thread has ended; returns its exit status."""
    said, connection = begin("core")
    memory_returner()
    endpoint = CoreEndpoint(Path(said.folder), said.index)
    engine_config = said.config.engine_config()
    try:
        with ended_with_supervisor(connection):
            loading = BackgroundLoad(engine_config, torch_libraries, binds_near_device=True)
            if torch_libraries is not None:
                torch_libraries.join()
            # Imported while the model is being loaded.
            from kestrel_runtime.engine.engine import LocalEngine

            gc.freeze()
            engine = LocalEngine(
                loading.result(), engine_config, owns_model=True, flight_record=endpoint.flight_record
            )
    except (CheckpointError, RecordUnavailable) as error:
        report(str(error))
        return 1
    engine.on_status_change(lambda now: end_within(END_TIMEOUT_S) if now is EngineStatus.DEAD else None)
    ended_well = False
    from kestrel_runtime.engine.warm_up import WarmUpFailed

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            ended_well = runner.run(_serve(engine, endpoint, said, connection))
    except WarmUpFailed as error:
        report(str(error))
        return 1
    finally:
        engine.close()
        if not engine.has_ended:
            end_now(0 if ended_well else 1)
    return 0 if ended_well else 1


async def _serve(
    engine: LocalEngine, endpoint: CoreEndpoint, said: messages.Begin, connection: socket.socket
) -> bool:
    """Serve until the supervisor ends this process or is gone, or the engine dies; returns False if it died."""
    from kestrel_grpc.multiprocess.engine_channel.core_server import CoreServer
    from kestrel_runtime.engine.warm_up import warm_up

    loop = asyncio.get_running_loop()
    with ended_with_supervisor(connection):
        await warm_up(engine)
    freeze_existing_objects(NEW_OBJECTS_OF_CORE)
    if said.index == 0:
        _log.info("%s", said.config.precision_line())
    reader = EngineReader(engine)

    def read() -> Reading:
        now = reader.read()
        return Reading(engine=now, caches=now.caches())

    registry = new_registry(read)
    link = new_link(lambda: asyncio.to_thread(generate_latest, registry))

    def lost(identity: str) -> None:
        loop.call_soon_threadsafe(link.notify, messages.FrontendStuck(identity))

    server = CoreServer(engine, endpoint, on_lost=lost)
    stopped, died = asyncio.Event(), death_of(engine)
    forget_expired_images(link, engine)
    link.on(messages.FrontendGone, lambda note: server.drop_frontend(note.identity))
    link.on(messages.Stop, lambda _: stopped.set())
    await server.start()
    await link.start(connection)
    link.notify(messages.Ready())
    keep_bytecode()
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait((stopping, died, link.closed), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if link.closed.done() and not died.done():
        _log.error("the supervisor is gone: running requests are finished")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(said.config.drain_timeout):
                await engine.drain()
    ended_well = not died.done()
    await server.close()
    await asyncio.to_thread(engine.close)
    link.close()
    return ended_well
