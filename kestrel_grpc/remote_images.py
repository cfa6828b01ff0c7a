"""Images that a request names by address, fetched within bounds. Who may be asked is decided by `image_uris.py`.

The address that a name stands for is looked up once, checked, and connected to, so that a second look-up cannot
lead elsewhere. No cookies, no proxies, no credentials; redirects only within the same host.
"""

from __future__ import annotations

import asyncio
import binascii
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin

import httpcore2

from kestrel_grpc import __version__
from kestrel_grpc.image_uris import (
    AllowedHost,
    ImageFetchFailed,
    ImageUriNotAllowed,
    Target,
    allowed_target,
    is_embedded,
    is_public,
)
from kestrel_runtime.errors import ImageError

MAX_CONCURRENT_FETCHES = 16
MAX_REDIRECTS = 3
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_HEAD_CHARS = 256
"""Of a `data:` URI, up to its comma: the type of the content."""
_MAX_ESCAPES = 1024
_PIECE_BYTES = 2**20  # a multiple of four, so that a piece is whole groups of base64
_HEADERS = (
    ("User-Agent", f"kestrel-grpc/{__version__}"),
    ("Accept", "image/*"),
    # A compressed answer could be small on the way and huge here.
    ("Accept-Encoding", "identity"),
)


class RemoteImages:
    """Fetches from `hosts`, at most `max_bytes` and for at most `timeout_s` each. Belongs to one event loop.

    `data:` URIs are read too. `allows_address` says which addresses may be connected to.
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
        self._decoding = asyncio.Lock()
        # A fetch above this number waits, as long as its time allows.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=MAX_CONCURRENT_FETCHES,
            keepalive_expiry=15.0,
            network_backend=_CheckedNetwork(allows_address),
        )

    async def fetch(self, uri: str) -> bytes:
        """The bytes that a URI names. Raises `ImageUriNotAllowed`, `ImageFetchFailed` or `ImageError`."""
        if is_embedded(uri):
            return await self._decode(uri)
        target = allowed_target(uri, self._hosts)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(target)
        except TimeoutError:
            raise ImageFetchFailed(f"took longer than {self._timeout_s:g} s") from None
        except httpcore2.ProtocolError as error:
            raise ImageFetchFailed("the host did not answer as a web server does") from error
        except (httpcore2.NetworkError, httpcore2.TimeoutException) as error:
            raise ImageFetchFailed("the host could not be reached, or broke off") from error

    async def close(self) -> None:
        """End the connections."""
        await self._pool.aclose()

    async def _decode(self, uri: str) -> bytes:
        """The content of a `data:` URI. One is decoded at a time, beside the event loop."""
        self._require_fit((len(uri) - _MAX_HEAD_CHARS - 2 * _MAX_ESCAPES) * 3 // 4)
        head, comma, _ = uri[:_MAX_HEAD_CHARS].partition(",")
        if not comma:
            raise ImageFetchFailed(f"has no comma within {_MAX_HEAD_CHARS} characters")
        async with self._decoding:
            content = await asyncio.to_thread(_embedded, uri, len(head) + 1, head.lower().endswith(";base64"))
        self._require_fit(len(content))
        return content

    async def _follow(self, target: Target) -> bytes:
        """What the target holds, or what it redirects to on the same host."""
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
        """The content, or the address that the host names instead."""
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


def _embedded(uri: str, start: int, is_base64: bool) -> bytes:
    """What a `data:` URI carries from `start` on. Decoded in pieces, since other threads wait during each."""
    if uri.count("%", start) > _MAX_ESCAPES:
        raise ImageFetchFailed(f"holds more than {_MAX_ESCAPES} escaped characters; use base64")
    if not uri.isascii():
        raise ImageFetchFailed("holds characters that must be escaped")
    text = uri[start:].encode()
    if "%" in uri:
        text = unquote_to_bytes(text)
    if not is_base64:
        return text
    try:
        pieces = [
            binascii.a2b_base64(text[position : position + _PIECE_BYTES], strict_mode=True)
            for position in range(0, len(text), _PIECE_BYTES)
        ]
    except binascii.Error:
        raise ImageFetchFailed("holds data that is not base64") from None
    # Only the last piece may end early.
    if any(len(piece) < _PIECE_BYTES * 3 // 4 for piece in pieces[:-1]):
        raise ImageFetchFailed("holds data that is not base64")
    return b"".join(pieces)


class _CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Looks a host up and connects to those of its addresses that are allowed."""

    def __init__(self, allows_address: Callable[[str], bool]) -> None:
        self._allows_address = allows_address
        self._network: Any = httpcore2.AnyIOBackend()  # typed as whatever it would be without anyio

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 the library's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
