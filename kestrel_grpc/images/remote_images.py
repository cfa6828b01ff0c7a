"""Fetches images that requests name by URI, with limits on size and time. `image_uris.py` decides which are
allowed.

The name of a host is resolved once, and its address is checked and connected to, so that a second resolution cannot
give another address. No cookies, proxies or credentials are sent; redirects are followed within the same host only.

Tenants share the limit of concurrent fetches, so that hosts that do not answer delay the fetches of one caller
alone.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urljoin

import httpcore2

from kestrel_grpc import __version__
from kestrel_grpc.images.image_uris import (
    AllowedHost,
    DataUris,
    ImageFetchFailed,
    ImageUriNotAllowed,
    Target,
    allowed_target,
    is_embedded,
    is_public,
)
from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.fairness.fair_limit import FairLimit

MAX_CONCURRENT_FETCHES = 32
"""The limit for all tenants together; one tenant alone may use half of it."""
MAX_REDIRECTS = 3
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HEADERS = (
    ("User-Agent", f"kestrel-grpc/{__version__}"),
    ("Accept", "image/*"),
    # A small compressed answer could be huge when decompressed.
    ("Accept-Encoding", "identity"),
)


class RemoteImages:
    """Fetches images from `hosts`, each within `max_bytes` and `timeout_s` seconds. Belongs to one event loop.

    `data:` URIs are decoded too. `allows_address` decides which IP addresses may be connected to.
    """

    def __init__(
        self,
        hosts: tuple[AllowedHost, ...],
        *,
        max_bytes: int,
        timeout_s: float,
        allows_address: Callable[[str], bool] = is_public,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._data_uris = DataUris(max_bytes)
        self._fetches = _FetchLimit(MAX_CONCURRENT_FETCHES)
        self._network = _CheckedNetwork(allows_address)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=MAX_CONCURRENT_FETCHES,
            keepalive_expiry=15.0,
            network_backend=self._network,
        )

    async def fetch(self, uri: str, tenant: str = "") -> bytes:
        """Returns the bytes that a URI names. Raises `ImageUriNotAllowed`, `ImageFetchFailed` or `ImageError`.

        Waits within its timeout while the limit of fetches, or the share of the tenant, is reached.
        """
        if is_embedded(uri):
            return await self._data_uris.decode(uri)
        target = allowed_target(uri, self._hosts)
        try:
            async with asyncio.timeout(self._timeout_s), self._turn(tenant):
                return await self._follow(target)
        except TimeoutError:
            raise ImageFetchFailed(f"took longer than {self._timeout_s:g} s") from None
        except httpcore2.ProtocolError as error:
            raise ImageFetchFailed("the host did not answer as a web server does") from error
        except (httpcore2.NetworkError, httpcore2.TimeoutException) as error:
            raise ImageFetchFailed("the host could not be reached, or broke off") from error

    async def close(self) -> None:
        """Closes the connections."""
        await self._pool.aclose()
        self._network.close()

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncGenerator[None, None]:
        await self._fetches.take(tenant)
        loop = asyncio.get_running_loop()
        with self._network.watched() as resolutions:
            try:
                yield
            finally:
                # A thread that resolves a name cannot be stopped: its turn ends when it has ended.
                running = next((item for item in resolutions if not item.done()), None)
                if running is None:
                    self._fetches.give_back(tenant)
                else:
                    running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._fetches.give_back, tenant))

    async def _follow(self, target: Target) -> bytes:
        """Returns the content of the target, following redirects within the same host."""
        host = target.host
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(target)
            if isinstance(found, bytes):
                return found
            target = allowed_target(found, self._hosts)
            if target.host != host:
                raise ImageUriNotAllowed("redirects to another host")
        raise ImageFetchFailed(f"redirects more than {MAX_REDIRECTS} times")

    async def _get(self, target: Target) -> bytes | str:
        """Returns the content, or the URI that the host redirects to."""
        url = httpcore2.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        async with self._pool.stream("GET", url, headers=_HEADERS) as response:
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in headers:
                return urljoin(str(target), headers[b"location"].decode("latin-1"))
            if response.status != 200:
                raise ImageFetchFailed(f"the host answered with status {response.status}")
            length = headers.get(b"content-length", b"")
            if length.isdigit():
                self._require_fit(int(length))
            content = bytearray()
            async for chunk in response.aiter_stream():
                content += chunk
                self._require_fit(len(content))
            return bytes(content)

    def _require_fit(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ImageError(f"is larger than {self._max_bytes} bytes", too_large=True)


class _FetchLimit:
    """Limits concurrent fetches, which tenants share as `FairLimit` says. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = FairLimit(limit)
        self._waiting: dict[asyncio.Future[None], str] = {}  # with their tenants, in the order of their arrival

    async def take(self, tenant: str) -> None:
        """Waits until the tenant may fetch."""
        if self._limit.take(tenant):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = tenant
        try:
            await turn
        except BaseException:
            if self._waiting.pop(turn, None) is None:  # it was granted in the same turn of the event loop
                self.give_back(tenant)
            raise

    def give_back(self, tenant: str) -> None:
        """Ends a fetch of the tenant, and lets the one start that has waited longest among those that may."""
        self._limit.give_back(tenant)
        for turn, waiting in tuple(self._waiting.items()):
            if not turn.done() and self._limit.take(waiting):
                del self._waiting[turn]
                turn.set_result(None)


class _CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Resolves a host and connects to those of its addresses that are allowed."""

    def __init__(self, allows_address: Callable[[str], bool]) -> None:
        self._allows_address = allows_address
        # Not the event loop's own threads, which slow name resolutions would keep from other work.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_FETCHES, thread_name_prefix="resolver")
        self._resolutions: ContextVar[list[Future[Any]]] = ContextVar("resolutions")
        self._network: Any = httpcore2.AnyIOBackend()  # its declared type is that without anyio installed

    @contextmanager
    def watched(self) -> Iterator[list[Future[Any]]]:
        """Collects the name resolutions of the current task during the block."""
        resolutions: list[Future[Any]] = []
        token = self._resolutions.set(resolutions)
        try:
            yield resolutions
        finally:
            self._resolutions.reset(token)

    def close(self) -> None:
        """Resolves no further names."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 the library's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            resolution = self._threads.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            self._resolutions.get().append(resolution)
            found = await asyncio.wrap_future(resolution)
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        addresses = [str(info[4][0]) for info in found]
        allowed = [address for address in addresses if self._allows_address(address)]
        if not allowed:
            raise ImageUriNotAllowed("names a host whose address is not public")
        for address in allowed[:-1]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore2.ConnectError:
                continue
        return await self._network.connect_tcp(allowed[-1], port, timeout, local_address, socket_options)
