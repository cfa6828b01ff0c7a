"""Serves the files of the web UI and describes the server to it.

The files are public: they come with the package, and say nothing about the server but whether it asks for tokens.
All further requests of the web UI need a token if the server asks for tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from kestrel_grpc import __version__
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.frontends.http.connection import App
from kestrel_grpc.frontends.http.endpoint import Operation
from kestrel_grpc.frontends.http.exchange import Exchange, Header, Receive, Scope, Send, encoded
from kestrel_grpc.frontends.http.output_json import to_json
from kestrel_runtime.api.engine import Engine

ROOT = "/page/"
"""The prefix of the paths of all files but `index.html`, which is at `/`."""
_MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "json": "application/json",
        "svg": "image/svg+xml",
        "png": "image/png",
    }
)
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Scripts may not turn text into HTML or code.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: tuple[Header, ...] = (
    *encoded(
        {
            "content-security-policy": _POLICY,
            # With `no-referrer` browsers may send `Origin: null`, which the server refuses.
            "referrer-policy": "same-origin",
            "permissions-policy": "camera=(self), microphone=(), geolocation=()",
            "cross-origin-resource-policy": "same-origin",
            # The browser asks each time whether a file has changed, so that it never mixes files of two versions.
            "cache-control": "no-cache",
        }
    ),
)


class WebUi:
    """Holds the files by their paths, and the operation that describes the server to the scripts."""

    def __init__(
        self,
        engine: Engine,
        *,
        grpc_port: Callable[[], int | None],
        is_encrypted: bool,
        asks_for_tokens: bool,
        stores_images: bool,
        fetches_images: bool,
    ) -> None:
        """`grpc_port` returns the port of gRPC once the server has started."""
        self._engine = engine
        self._grpc_port = grpc_port
        self._is_encrypted = is_encrypted
        self._stores_images = stores_images
        self._fetches_images = fetches_images
        # A file of its own, so that the scripts learn it without a request that is refused.
        access = _StaticFile(to_json({"asks_for_tokens": asks_for_tokens}), _MEDIA_TYPES["json"])
        self.files: Mapping[str, App] = {**dict(_files()), f"{ROOT}access.json": access}
        self.description = Operation("GET", f"{ROOT}server.json", "http/page", None, self._describe)

    async def _describe(self, _: object, call: CallContext) -> bytes:
        info = self._engine.info
        skills: dict[str, dict[str, Any]] = {}
        for name, given in info.skills.items():
            defaults = {
                "temperature": given.temperature,
                "top_p": given.top_p,
                "max_tokens": given.max_tokens,
                "max_objects": given.max_objects,
            }
            skills[name] = {key: value for key, value in defaults.items() if value is not None}
        facts = {
            "version": __version__,
            "model": info.model,
            "adapters": await self._engine.adapter_names(),
            "skills": skills,
            "max_image_bytes": info.config.max_image_bytes,
            "grpc_port": self._grpc_port(),
            "is_encrypted": self._is_encrypted,
            "stores_images": self._stores_images,
            "fetches_images": self._fetches_images,
        }
        return to_json(facts)


class _StaticFile:
    """Answers GET and HEAD with one file, as an ASGI application."""

    def __init__(self, data: bytes, media_type: str) -> None:
        self._data = data
        self._media_type = media_type.encode()
        self._tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        request_id = CallContext(exchange.headers, None, "").request_id
        is_known = self._tag in _tags(exchange.header("if-none-match"))
        await exchange.respond(
            304 if is_known else 200,
            b"" if is_known else self._data,
            request_id,
            content_type=self._media_type,
            headers=(*_HEADERS, (b"etag", self._tag.encode())),
        )


def _files() -> Iterator[tuple[str, _StaticFile]]:
    for item in files("kestrel_grpc.frontends.web_ui").joinpath("static").iterdir():
        path = "/" if item.name == "index.html" else f"{ROOT}{item.name}"
        yield path, _StaticFile(item.read_bytes(), _MEDIA_TYPES[item.name.rpartition(".")[2]])
    example = files("kestrel_grpc").joinpath("demo_picture.png")
    yield f"{ROOT}example.png", _StaticFile(example.read_bytes(), _MEDIA_TYPES["png"])


def _tags(header: str | None) -> set[str]:
    """Returns the tags of an `If-None-Match` header."""
    return {tag.strip().removeprefix("W/") for tag in (header or "").split(",")}
