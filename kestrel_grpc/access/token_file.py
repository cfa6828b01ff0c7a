"""Reads the file of tokens: who may call which methods, and how often. `access.py` applies these rules to calls.

Each line of the TOML file is a token. The file holds hashes, so a reader of the file cannot call:

    alice = { sha256 = "2bb80d53…", scopes = ["infer"], rate = 10, burst = 20, concurrency = 4 }
    operator = { sha256 = "9f86d081…", scopes = ["infer", "admin"] }
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from kestrel_grpc.access.limits import TokenLimit
from kestrel_grpc.access.reloaded_files import read_regular_file
from kestrel_runtime.api.errors import did_you_mean
from kestrel_runtime.api.requests import Priority

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHARED = "shared:"
_SETTINGS = ("sha256", "scopes", "rate", "burst", "concurrency", "namespace", "max_priority", "expires")


class Scope(Enum):
    """A permission that a token can have."""

    INFER = "infer"
    """The permission to send requests to the model and to list the models."""
    IMAGES = "images"
    """The permission to store images on the server."""
    ADMIN = "admin"
    """The permission to operate the server: load and metrics, caches, adapters, and requests of other callers."""


@dataclass(frozen=True, slots=True)
class Token:
    """Holds one line of the file."""

    name: str
    sha256: bytes
    scopes: frozenset[Scope]
    limit: TokenLimit | None = None
    """The limits of the token; None if neither its rate nor its concurrency is limited."""
    shared_namespace: str | None = None
    """The `namespace` of the line; tokens with the same one share stored and cached images. None: it shares with no
    other."""
    max_priority: Priority = Priority.NORMAL
    """The highest priority that its requests have compared with those of other tokens."""
    expires_at: datetime | None = None
    """The time from which the token is refused, in UTC; None if it does not expire."""

    @property
    def namespace(self) -> str:
        """The namespace of the token's images. It never equals the shared namespace of other tokens."""
        return f"token:{self.name}" if self.shared_namespace is None else shared_namespace(self.shared_namespace)


class TokenFileError(ValueError):
    """The file cannot be read or is invalid; the message names every violation."""


def read_tokens(path: Path) -> Mapping[bytes, Token]:
    """Returns the tokens of a file by their hash, at least one. Raises `TokenFileError`."""
    try:
        tokens = parse_tokens(read_regular_file(path).decode())
    except OSError as error:
        raise TokenFileError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, not TOML, or not of tokens
        raise TokenFileError(f"{path}: {error}") from error
    if not tokens:
        # Such a server would refuse every call: the file is being written, or its contents are lost.
        raise TokenFileError(f"{path}: holds no tokens; `kestrel-grpc token new NAME` makes one")
    return tokens


def parse_tokens(text: str) -> Mapping[bytes, Token]:
    """Returns the tokens in the text of a file by their hash. Raises `ValueError` with every violation."""
    table = tomllib.loads(text)
    problems: list[str] = []
    tokens: dict[bytes, Token] = {}
    for name, settings in table.items():
        found = list(_problems(name, settings))
        problems += (f"{name}: {problem}" for problem in found)
        if found:
            continue
        token = _token(name, settings)
        if token.sha256 in tokens:
            problems.append(f"{name}: is the same token as {tokens[token.sha256].name}")
        tokens[token.sha256] = token
    if problems:
        raise TokenFileError("; ".join(problems))
    return tokens


def shared_namespace(name: str) -> str:
    """Returns the namespace of all tokens whose line has this `namespace`."""
    return f"{_SHARED}{name}"


def shared_names(namespaces: Iterable[str]) -> list[str]:
    """Returns the names that lines give as `namespace`, in order, of these namespaces."""
    return sorted({space.removeprefix(_SHARED) for space in namespaces if space.startswith(_SHARED)})


def hash_of(secret: str) -> bytes:
    """Returns the hash that the file holds. Secrets are random and long, so a plain hash protects them."""
    return hashlib.sha256(secret.encode()).digest()


def new_secret() -> str:
    """Returns a random token, with a prefix by which scanners for leaked secrets recognise it."""
    return f"kestrel_{secrets.token_urlsafe(32)}"


def line_for(name: str, secret: str, scopes: frozenset[Scope], expires: date | datetime | None = None) -> str:
    """Returns the line of the file that makes a secret valid, until `expires`. Raises `ValueError` if the file
    cannot hold the name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name is 1 to 64 letters, digits, underscores and hyphens, not {name!r}")
    listed = ", ".join(f'"{scope.value}"' for scope in Scope if scope in scopes)
    until = "" if expires is None else f", expires = {expires.isoformat()}"
    return f'{name} = {{ sha256 = "{hash_of(secret).hex()}", scopes = [{listed}]{until} }}'


def _token(name: str, settings: Mapping[str, Any]) -> Token:
    rate, concurrency = settings.get("rate"), settings.get("concurrency")
    sha256 = bytes.fromhex(settings["sha256"])
    limit = None
    if rate is not None or concurrency is not None:
        # By default the calls of one second may come at once.
        burst = settings.get("burst", 1 if rate is None else max(1, math.ceil(rate)))
        limit = TokenLimit(name, sha256, rate, burst, concurrency)
    return Token(
        name=name,
        sha256=sha256,
        scopes=frozenset(Scope(word) for word in settings["scopes"]),
        limit=limit,
        shared_namespace=settings.get("namespace"),
        max_priority=Priority[settings.get("max_priority", "normal").upper()],
        expires_at=_moment(settings["expires"]) if "expires" in settings else None,
    )


def _problems(name: str, settings: Any) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield "a name is 1 to 64 letters, digits, underscores and hyphens"
    if not isinstance(settings, dict):
        yield 'must be like { sha256 = "…", scopes = ["infer"] }'
        return
    for key in settings:
        if key not in _SETTINGS:
            yield f"no setting is named {key}{did_you_mean(key, _SETTINGS)}"
    sha256, scopes, rate = settings.get("sha256"), settings.get("scopes"), settings.get("rate")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        yield "sha256 must be 64 hexadecimal digits, in lower case"
    words = [scope.value for scope in Scope]
    if not isinstance(scopes, list) or not scopes or any(word not in words for word in scopes):
        yield f"scopes must be a list of {', '.join(words)}"
    if rate is not None and not (_is_number(rate) and 0 < rate < math.inf):
        yield "rate must be a number of requests per second above 0"
    for key in ("burst", "concurrency"):
        value = settings.get(key)
        if value is not None and not (_is_number(value) and isinstance(value, int) and value >= 1):
            yield f"{key} must be a whole number of requests from 1"
    namespace = settings.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and _NAME.fullmatch(namespace)):
        yield "namespace must be 1 to 64 letters, digits, underscores and hyphens"
    priorities = [priority.name.lower() for priority in Priority]
    if settings.get("max_priority", "normal") not in priorities:
        yield f"max_priority must be one of {', '.join(priorities)}"
    if "expires" in settings and _moment(settings["expires"]) is None:
        yield "expires must be a date such as 2027-01-31, or a time with its offset such as 2027-01-31T12:00:00Z"
    if "burst" in settings and rate is None:
        yield "burst needs a rate"


def _moment(value: Any) -> datetime | None:
    """Returns the time that a date, at 00:00, or a time of TOML means, in UTC; None for other values."""
    if isinstance(value, datetime):
        try:
            return None if value.tzinfo is None else value.astimezone(UTC)
        except OverflowError:  # in the first or the last year
            return None
    return datetime(value.year, value.month, value.day, tzinfo=UTC) if isinstance(value, date) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
