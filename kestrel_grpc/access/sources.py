"""Decides from the headers whether a request may come from a web page, or is meant for another host.

A web page that a user of this machine opens can send requests to a server on it. Requests of pages of another site
carry an `Origin`. A site whose name has been made to resolve to this machine (DNS rebinding) sends that name as
`Host` and also as `Origin`, so `Origin` is compared with `Host` only after `Host` has been found to be a name of
this server. Callers other than browsers are not affected: they send no `Origin`, and as `Host` the name that they
connect to, or none in HTTP/1.0.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Sequence

from kestrel_runtime.api.errors import InvalidRequest, Violation

RawHeaders = Sequence[tuple[bytes, bytes]]


SITE_KEY = "sec-fetch-site"
"""The header in which a browser says from which site a request comes; no script of a page can change it."""
_OWN_SITES = frozenset(("same-origin", "none"))


class SourceNotAllowed(Exception):
    """The call was made for another host, or by a page of another site. `header` is the header that
    says so."""

    def __init__(self, header: str, value: str) -> None:
        super().__init__(header, value)
        self.header = header
        self.value = value


class SourceGuard:
    """Checks `Host` and `Origin` of requests.

    `hosts` are the names of the server in addition to addresses and `localhost`. If `hosts` is None, every name is
    allowed: such a server asks for a token, which no page has. Pages of the sites `origins`, such as
    `https://example.com`, may call. If `has_pages` is True, the server's own pages may call as well: their origin
    is the scheme and the `Host` of the request itself.
    """

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str], *, has_pages: bool) -> None:
        self._has_pages = has_pages
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower() for origin in origins)
        self._known_good: set[bytes] = set()

    def check(self, headers: RawHeaders, scheme: str, version: str) -> None:
        """Raises `SourceNotAllowed` if the request must not be answered.

        Raises `InvalidRequest` unless exactly one host is named. `scheme` is that of the connection, `http` or
        `https`; `version` that of HTTP, `1.0` or `1.1`.
        """
        host: bytes | None = None
        origins: list[str] = []
        for name, value in headers:
            if name == b"host":
                if host is not None:
                    raise _invalid("must be given once")
                host = value
            elif name == b"origin":
                origins.append(value.decode("latin-1"))
        if host is not None:
            self._check_host(host)
        elif version != "1.0":  # HTTP/1.0 has no such header; browsers send it in any version
            raise _invalid("is required")
        own = "" if host is None else f"{scheme}://{host.decode('latin-1').lower()}"
        for origin in origins:
            if not self._may_call(origin.lower(), own):
                raise SourceNotAllowed("Origin", origin)

    def _check_host(self, host: bytes) -> None:
        if host in self._known_good:
            return
        if not self._is_ours(host.decode("latin-1").lower()):
            raise SourceNotAllowed("Host", host.decode("latin-1"))
        if len(self._known_good) < 64:
            self._known_good.add(host)

    def _may_call(self, origin: str, own: str) -> bool:
        """Returns True if pages of `origin` may call. `own` is the origin of the server's own pages for this
        caller."""
        return origin in self._origins or (self._has_pages and origin == own != "")

    def _is_ours(self, host: str) -> bool:
        name, separator, port = host.rpartition(":")
        if not separator or not port.isdecimal():
            name = host
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        if name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return True
        return self._hosts is None or name in self._hosts


def require_own_site(values: Iterable[str]) -> None:
    """Raises `SourceNotAllowed` if a browser says that a page of another site sends the request.

    `values` are those of the header `SITE_KEY`. Requests that pages may send without asking the server first, such
    as forms, need this check in addition to that of `SourceGuard`.
    """
    for value in values:
        if value.lower() not in _OWN_SITES:
            raise SourceNotAllowed("Sec-Fetch-Site", value)


def _invalid(description: str) -> InvalidRequest:
    return InvalidRequest((Violation("Host", description),))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
