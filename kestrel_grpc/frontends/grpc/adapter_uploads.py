"""Implements `EngineService.UploadAdapter` and `DeleteAdapter`, which change the folder of adapters.

An adapter is received, checked, and added; another one is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kestrel_client.v1 import engine_service_pb2 as wire
from kestrel_grpc.adapter_folder import AdapterFolder, AnnouncedAdapter, StagedAdapter, path_violation
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.message_gate import MessageTimeout
from kestrel_grpc.frontends.grpc.parsing import chunk_of, header_of
from kestrel_grpc.images.stored_images import BAD_SHA256, is_sha256
from kestrel_runtime.api.adapters import MAX_CONFIG_BYTES, AdapterName
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import InvalidRequest, Violation

NOT_A_NAME = "must be the name of an adapter, such as name or name@step"
_LEAST_BYTES_PER_S = 64 * 2**10
_MAX_THREADS = 4

Result = TypeVar("Result")


class AdapterUploads:
    """Receives adapters, and removes them. Nothing of an upload that fails stays in the folder.

    `timeout_s` bounds the wait for each part. All parts together may take that time, and a second for each 64 KiB.
    """

    def __init__(self, engine: Engine, folder: AdapterFolder, timeout_s: float) -> None:
        self._engine = engine
        self._folder = folder
        self._timeout_s = timeout_s
        # Threads of their own: the folder may be on a mount that does not answer.
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "kestrel-adapter-uploads")

    async def receive(
        self, messages: AsyncIterator[wire.UploadAdapterRequest], call: CallContext
    ) -> wire.UploadAdapterResponse:
        """Answers the call of an upload. Raises the errors that `proto/` lists."""
        parts = _Parts(messages, self._timeout_s)
        announced = adapter_header(await parts.next())
        call.audited = {"adapter": str(announced.name)}
        staged = self._folder.staged(announced)
        try:
            await self._run(staged.open)
            while (message := await parts.next()) is not None:
                await self._run(staged.write, chunk_of(message))
            await self._run(staged.finish)
            # Once the adapter has its name, the engines hear of it, also if the caller hangs up.
            return await asyncio.shield(self._publish(staged, announced, call))
        finally:
            await asyncio.shield(self._run(staged.discard))

    async def delete(self, name: AdapterName) -> wire.DeleteAdapterResponse:
        """Removes an adapter. Raises the errors that `proto/` lists."""
        return await asyncio.shield(self._delete(name))  # the engines hear of it, also if the caller hangs up

    async def _delete(self, name: AdapterName) -> wire.DeleteAdapterResponse:
        await self._run(self._folder.remove, name)
        await self._engine.adapter_changed(str(name))
        num_requests = sum(info.num_requests for info in self._engine.adapters() if info.name == str(name))
        return wire.DeleteAdapterResponse(request_count=num_requests)

    async def _publish(
        self, staged: StagedAdapter, announced: AnnouncedAdapter, call: CallContext
    ) -> wire.UploadAdapterResponse:
        name = str(announced.name)
        digest = await self._engine.check_adapter(staged.folder, name)
        call.audited = {"adapter": name, "digest": digest}
        has_replaced = await self._run(staged.publish)
        call.audited = {**call.audited, "replaced": int(has_replaced)}
        await self._engine.adapter_changed(name)
        return wire.UploadAdapterResponse(name=name, digest=digest, replaced=has_replaced)

    def _run(self, work: Callable[..., Result], *arguments: object) -> asyncio.Future[Result]:
        """Has a thread do work on the folder."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class _Parts:
    """Reads the messages of an upload, and ends it if they come too slowly."""

    def __init__(self, messages: AsyncIterator[wire.UploadAdapterRequest], timeout_s: float) -> None:
        self._messages = messages
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + timeout_s

    async def next(self) -> wire.UploadAdapterRequest | None:
        """Returns the next message; None at the end. Raises `MessageTimeout`."""
        try:
            async with asyncio.timeout_at(min(self._ends, self._loop.time() + self._timeout_s)):
                message = await anext(self._messages, None)
        except TimeoutError:
            raise MessageTimeout(self._timeout_s) from None
        if message is not None:
            self._ends += len(message.chunk) / _LEAST_BYTES_PER_S
        return message


def adapter_header(message: wire.UploadAdapterRequest | None) -> AnnouncedAdapter:
    """Reads the first message of an upload. Raises `InvalidRequest` with all violations."""
    found = header_of(message)
    violations: list[Violation] = []
    name = AdapterName.parse(found.name)
    problem = NOT_A_NAME if name is None else path_violation(name)
    if problem is not None:
        violations.append(Violation("header.name", problem))
    if found.size_bytes < 1:
        violations.append(Violation("header.size_bytes", "must be positive"))
    if found.sha256 and not is_sha256(found.sha256):
        violations.append(Violation("header.sha256", BAD_SHA256))
    if len(found.config) > MAX_CONFIG_BYTES:
        violations.append(Violation("header.config", f"must not exceed {MAX_CONFIG_BYTES} bytes"))
    if name is None or violations:
        raise InvalidRequest(tuple(violations))
    config = found.config if found.HasField("config") else None
    return AnnouncedAdapter(name, found.size_bytes, found.sha256, config, found.replace)
