"""Decides which images that requests name by URI may be fetched, and decodes `data:` URIs.

`remote_images.py` fetches images, from listed hosts and public addresses only.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from kestrel_grpc.images.data_urls import DataTooLarge, DataUnreadable, decode_data_url, is_data_url
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation

MAX_URI_CHARS = 2048
_FIELD = "image.uri"
_PORTS = {"https": 443, "http": 80}
# All public addresses of IPv6 are in this range. Other addresses belong to a single network, or embed an IPv4
# address in one of several ways (::a.b.c.d, ::ffff:0:a.b.c.d, 64:ff9b:1::/48).
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# The exception: NAT64 gateways translate these into the IPv4 address in the last 32 bits.
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
_MAX_BEGIN_CHARS = 256


class ImageUriNotAllowed(InvalidRequest):
    """The server does not fetch images from this URI."""

    def __init__(self, description: str) -> None:
        super().__init__((Violation(_FIELD, description),))


class ImageFetchFailed(InvalidRequest):
    """The URI is allowed, but the image could not be fetched."""

    def __init__(self, description: str) -> None:
        super().__init__((Violation(_FIELD, description),))


class RemoteImagesUnavailable(Exception):
    """The libraries that fetching needs are not installed."""


class ImageSource(Protocol):
    """Fetches images that requests name by URI."""

    async def fetch(self, uri: str, tenant: str = "") -> bytes:
        """Returns the bytes of an image file. `tenant` is the caller, whose fetches share a limit.

        Raises an `InvalidRequest` that says why there is no image.
        """
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class NoRemoteImages:
    """Refuses every URI: images are taken as bytes only."""

    async def fetch(self, uri: str, tenant: str = "") -> bytes:
        """Raises `ImageUriNotAllowed`."""
        raise ImageUriNotAllowed(
            "this server fetches no images; send the bytes of the image, or start the server with --image-hosts"
        )

    async def close(self) -> None:
        """Does nothing: there are no connections."""


@dataclass(frozen=True, slots=True)
class Target:
    """Holds the parts of a URI. `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """Names a host that images may be fetched from. `.example.com` means every host below it, but not itself."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> AllowedHost:
        """Parses `example.com`, `.example.com`, `example.com:8443` or, without encryption, `http://example.com`."""
        scheme, separator, rest = text.partition("://")
        if not separator:
            scheme, rest = "https", text
        try:
            parts = urlsplit(f"//{rest}")
            netloc, host, port = parts.netloc, parts.hostname, parts.port
        except ValueError:
            netloc, host, port = None, None, None
        if scheme not in _PORTS or not host or not text.isascii() or netloc != rest or "@" in rest:
            raise ValueError("must be hosts such as example.com or .example.com, separated by commas")
        return cls(scheme, host, _PORTS[scheme] if port is None else port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def matches(self, target: Target) -> bool:
        """Returns True if the target is on this host."""
        if (self.scheme, self.port) != (target.scheme, target.port):
            return False
        return target.host.endswith(self.host) if self.host.startswith(".") else target.host == self.host


def parse_hosts(text: str) -> tuple[AllowedHost, ...]:
    """Parses a list of hosts, separated by commas. Raises `ValueError`."""
    return tuple(AllowedHost.parse(part.strip()) for part in text.split(","))


def allowed_target(uri: str, hosts: tuple[AllowedHost, ...]) -> Target:
    """Returns the parts of a URI. Raises `ImageUriNotAllowed` unless it is on one of the hosts."""
    if len(uri) > MAX_URI_CHARS:
        raise ImageUriNotAllowed(f"is longer than {MAX_URI_CHARS} characters")
    # Parsers of URIs disagree about anything else than printable ASCII, and about backslashes.
    if not uri.isascii() or not uri.isprintable() or " " in uri or "\\" in uri:
        raise ImageUriNotAllowed("is not a well-formed URI")
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ImageUriNotAllowed("is not a well-formed URI") from None
    if parts.scheme not in _PORTS or not host:
        raise ImageUriNotAllowed("must begin with https:// and a host, or with data:")
    if "@" in parts.netloc:
        raise ImageUriNotAllowed("must hold no user name or password")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = Target(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)
    if not any(allowed.matches(target) for allowed in hosts):
        raise ImageUriNotAllowed(
            "is not on a host that this server fetches images from; its option --image-hosts names them"
        )
    return target


def is_public(address: str) -> bool:
    """Returns True if an IP address is public, and not an address of a private or local network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in _GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


def is_embedded(uri: str) -> bool:
    """Returns True if a URI holds its content, as `data:` URIs do."""
    return is_data_url(uri[:_MAX_BEGIN_CHARS].encode(errors="replace"))


class DataUris:
    """Decodes one URI at a time, of at most `max_bytes` of content. Belongs to one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._decoding = asyncio.Lock()

    async def decode(self, uri: str) -> bytes:
        """Returns the content. Raises `ImageFetchFailed`, or `ImageError` if it is too large."""
        async with self._decoding:
            return await asyncio.to_thread(_decode, uri, self._max_bytes)


def _decode(uri: str, max_bytes: int) -> bytes:
    """Returns the content of a `data:` URI."""
    if not uri.isascii():
        raise ImageFetchFailed("holds characters that must be escaped")
    try:
        return decode_data_url(uri.encode(), max_bytes)
    except DataUnreadable as error:
        raise ImageFetchFailed(str(error)) from None
    except DataTooLarge:
        raise ImageError(f"is larger than {max_bytes} bytes", too_large=True) from None
