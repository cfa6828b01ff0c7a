"""Runs the process of a front end: serves calls over the engine cores until the supervisor ends it.

`python -m kestrel_grpc.multiprocess.supervision frontend DESCRIPTOR` runs it (`__main__.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path

from kestrel_grpc.access.tls import CertificateError
from kestrel_grpc.access.token_file import TokenFileError
from kestrel_grpc.images.image_uris import RemoteImagesUnavailable
from kestrel_grpc.multiprocess.engine_channel.core_connection import BuildMismatch
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.engine_client import EngineClient
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.supervision.child import OTHER_BUILD, begin, memory_returner, new_link
from kestrel_grpc.multiprocess.supervision.sharing import LinkedState
from kestrel_grpc.process.bytecode import keep_bytecode
from kestrel_grpc.process.exit import END_TIMEOUT_S, end_now, end_within
from kestrel_grpc.process.free_ports import PortUnavailable
from kestrel_grpc.process.resources import freeze_existing_objects, loop_factory, lower_grpc_threads
from kestrel_grpc.server import Server
from kestrel_grpc.telemetry.logs import report
from kestrel_grpc.telemetry.tracing import TracingUnavailable
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.memory.host_limits import processor_quota

_OOM_SCORE = 300
"""Makes the kernel end a front end before a core when memory runs out, since a core takes longer to start."""

_log = logging.getLogger(__name__)


def main() -> int:
    """Run the process; returns its exit status."""
    said, connection = begin("frontend")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(_OOM_SCORE))
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            has_closed = runner.run(_Frontend(said).serve(connection))
    except (TokenFileError, CertificateError) as error:
        report(str(error))
        return 2
    except (PortUnavailable, RemoteImagesUnavailable, TracingUnavailable) as error:
        report(str(error))
        return 1
    except BuildMismatch as error:
        _log.error("%s", error)
        return OTHER_BUILD
    if not has_closed:
        end_now(0)
    return 0


class _Frontend:
    """A server over the engine cores."""

    def __init__(self, said: messages.Begin) -> None:
        self._said = said
        self._link = new_link(self._own_metrics)
        self._shared = LinkedState(
            self._link,
            Path(said.folder),
            said.identity,
            num_frontends=said.num_frontends,
            instance_id=said.instance_id,
        )
        self._connecting: dict[int, asyncio.Task[None]] = {}
        """Connections to new processes of cores, by index."""
        self._news: list[messages.CoreGone | messages.CoreReady] = []
        """Notes about cores that arrived before there was a client."""
        self._core_came = asyncio.Event()
        self._client: EngineClient | None = None
        self._server: Server | None = None
        self._begins_drain, self._stops = asyncio.Event(), asyncio.Event()
        self._mismatch: BuildMismatch | None = None

    async def serve(self, connection: socket.socket) -> bool:
        """Serve until the supervisor ends this process or is gone; returns True if all connections were closed."""
        link, said = self._link, self._said
        link.on(messages.CoreGone, self._core_gone)
        link.on(messages.CoreReady, self._core_ready)
        link.on(messages.Drain, lambda _: self._begins_drain.set())
        link.on(messages.Stop, lambda _: self._stops.set())
        await link.start(connection)
        connecting = asyncio.ensure_future(self._connect_first())
        stopping = asyncio.ensure_future(self._stops.wait())
        draining = asyncio.ensure_future(self._begins_drain.wait())
        await asyncio.wait((connecting, stopping, draining, link.closed), return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            connecting.cancel()
            stopping.cancel()
            draining.cancel()
            return True
        self._client = client = connecting.result()
        for note in self._news:
            self._core_gone(note) if isinstance(note, messages.CoreGone) else self._core_ready(note)
        at_rest = memory_returner()
        self._server = server = Server(
            client, said.config, at_rest=at_rest, shared=self._shared, num_processors=processor_quota()
        )
        link.on(messages.Withdraw, lambda _: server.withdraw())
        link.on(messages.ReadAgain, lambda _: server.read_again())
        link.on(messages.Announce, lambda _: server.announce())
        client.on_status_change(lambda now: link.notify(messages.Serving(now is EngineStatus.SERVING)))
        freeze_existing_objects()
        lower_grpc_threads()
        await server.start()
        link.notify(messages.Serving(client.status is EngineStatus.SERVING))
        link.notify(messages.Ready())
        if said.index == 0:
            keep_bytecode()
        await asyncio.wait((stopping, draining, link.closed), return_when=asyncio.FIRST_COMPLETED)
        if link.closed.done():
            _log.error("the supervisor is gone: running calls are finished")
            end_within(said.config.drain_timeout + END_TIMEOUT_S)
        if not stopping.done():
            ending = asyncio.ensure_future(server.drain())
            await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
        end_within(END_TIMEOUT_S)
        stopping.cancel()
        draining.cancel()
        for task in self._connecting.values():
            task.cancel()
        await server.stop()
        link.close()
        if self._mismatch is not None:
            raise self._mismatch
        return server.has_closed

    async def _own_metrics(self) -> bytes:
        return b"" if self._server is None else await asyncio.to_thread(self._server.metrics_text)

    async def _connect_first(self) -> EngineClient:
        """Returns a client of the cores that serve, once one does; `CoreReady` announces the others later."""
        said, ready = self._said, set(self._said.ready_cores)
        while not ready:
            await self._core_came.wait()
            # The last news of each core count.
            states = {note.index: isinstance(note, messages.CoreReady) for note in self._news}
            ready = {index for index, is_ready in states.items() if is_ready}
            self._core_came.clear()
        endpoints = [CoreEndpoint(Path(said.folder), index) for index in range(said.num_cores)]
        absent = set(range(said.num_cores)) - ready
        return await EngineClient.connect(endpoints, said.identity, absent=absent)

    def _core_gone(self, note: messages.CoreGone) -> None:
        if self._client is None:
            self._news.append(note)
            return
        if note.index in self._connecting:
            self._connecting.pop(note.index).cancel()
        self._client.core_gone(note.index, is_fault=note.is_fault)

    def _core_ready(self, note: messages.CoreReady) -> None:
        if self._client is None:
            self._news.append(note)
            self._core_came.set()
        else:
            self._connecting[note.index] = asyncio.ensure_future(self._connect(self._client, note.index))

    async def _connect(self, client: EngineClient, index: int) -> None:
        try:
            await client.core_ready(index)
        except BuildMismatch as error:
            self._mismatch = error
            self._stops.set()
