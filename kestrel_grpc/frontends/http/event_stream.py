"""Writes server-sent events, with a comment now and then while there are none."""

from __future__ import annotations

import asyncio

from kestrel_grpc.frontends.http.exchange import Exchange

HEARTBEAT_S = 15.0
"""Proxies close connections on which nothing was sent for a minute or so."""
_HEARTBEAT = b": waiting\n\n"


class EventStream:
    """The response begins with the first event or heartbeat: until then a refusal can have its own status."""

    def __init__(self, exchange: Exchange, request_id: str, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.has_begun = False
        self._exchange = exchange
        self._request_id = request_id
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._written_at = self._loop.time()
        self._timer = self._loop.call_later(heartbeat_s, self._look)
        self._beating: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Send one or more whole events."""
        self._is_writing = True
        if not self.has_begun:
            self.has_begun = True
            await self._exchange.begin_events(self._request_id)
        await self._exchange.write(data)
        self._is_writing = False
        self._written_at = self._loop.time()

    async def end(self, data: bytes = b"") -> None:
        """Send the last events, and that nothing follows."""
        await self._exchange.write(data, is_last=True)

    def close(self) -> None:
        """No heartbeat from now on."""
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()

    def _look(self) -> None:
        silent_s = self._loop.time() - self._written_at
        if silent_s >= self._heartbeat_s and not self._is_writing:
            self._beating = self._loop.create_task(self.write(_HEARTBEAT))
            silent_s = 0.0
        self._timer = self._loop.call_later(max(self._heartbeat_s - silent_s, 0.01), self._look)
