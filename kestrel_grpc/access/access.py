"""Checks who may call which methods, and how often, by the bearer tokens that `token_file.py` reads.

    TokenInvalid     no token, an unknown one, or one that was revoked or has expired
    ScopeRequired    the token does not allow this method
    RateLimited      the token has reached one of its limits

A token that is revoked or expires while its calls run ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from kestrel_grpc.access.limits import AccessRefused, CountedCall, Limits, TokenLimit, TokenLimits
from kestrel_grpc.access.reloaded_files import RELOAD_INTERVAL_S, ReloadedFiles
from kestrel_grpc.access.token_file import Scope, Token, hash_of, read_tokens
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.requests import Priority

_log = logging.getLogger(__name__)
_MAX_LOGGED_NAMES = 20

Metadata = Iterable[tuple[str, str | bytes]]

_AUTHORIZATION_KEY = "authorization"
_SCHEME = "bearer "
_ANY_SCOPE = frozenset(Scope)
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_INFER = frozenset((Scope.INFER,))
_IMAGES = frozenset((Scope.IMAGES,))
_ADMIN = frozenset((Scope.ADMIN,))

# The scopes by method or by service, one of which is enough. All other methods need the scope `admin`.
SCOPES: Mapping[str, frozenset[Scope]] = MappingProxyType(
    {
        "kestrel.v1.VisionService/": _INFER,
        "kestrel.v1.ImageService/": _IMAGES,
        "kestrel.v1.EngineService/GetServerInfo": _ANY_SCOPE,
        "kestrel.v1.EngineService/ListModels": _ANY_SCOPE,
        # It reports the load of all callers together.
        "kestrel.v1.EngineService/GetLoad": _ADMIN,
        "inference.GRPCInferenceService/ModelInfer": _INFER,
        "inference.GRPCInferenceService/ModelStreamInfer": _INFER,
        "inference.GRPCInferenceService/SystemSharedMemoryStatus": _INFER,
        "inference.GRPCInferenceService/SystemSharedMemoryRegister": _INFER,
        "inference.GRPCInferenceService/SystemSharedMemoryUnregister": _INFER,
        "inference.GRPCInferenceService/ServerMetadata": _ANY_SCOPE,
        "inference.GRPCInferenceService/ModelMetadata": _ANY_SCOPE,
        "inference.GRPCInferenceService/ModelConfig": _ANY_SCOPE,
        "inference.GRPCInferenceService/RepositoryIndex": _ANY_SCOPE,
        "grpc.reflection.v1.ServerReflection/": _ANY_SCOPE,
        "grpc.reflection.v1alpha.ServerReflection/": _ANY_SCOPE,
        "rest/": _INFER,
        "rest/images": _IMAGES,
        "rest/images.get": _IMAGES,
        "rest/images.delete": _IMAGES,
        "rest/server": _ANY_SCOPE,
        "openai/": _INFER,
        "openai/models": _ANY_SCOPE,
        "http/openapi": _ANY_SCOPE,
        "http/page": _ANY_SCOPE,
        "http/metrics": _ADMIN,
    }
)


class TokenInvalid(AccessRefused):
    """The call has no token that the server knows. A token that has expired, at `expires_at` in UTC, or was revoked
    while the call ran has its name."""

    def __init__(self, name: str = "", expires_at: datetime | None = None) -> None:
        super().__init__()
        self.name = name
        self.expires_at = expires_at


class ScopeRequired(AccessRefused):
    """The token is known but does not allow this method. The method needs one of `scopes`."""

    def __init__(self, scopes: frozenset[Scope], name: str) -> None:
        super().__init__()
        self.name = name
        self.scopes = tuple(scope.value for scope in Scope if scope in scopes)


class AdmittedCall(Protocol):
    """Describes a call that has been admitted."""

    @property
    def name(self) -> str:
        """The name of the caller."""
        ...

    @property
    def namespace(self) -> str:
        """The namespace of the caller."""
        ...

    @property
    def max_priority(self) -> Priority:
        """The highest priority that requests of the caller have compared with those of other callers."""
        ...

    async def count_further(self, count: int) -> None:
        """Counts so many further requests of the call towards its limits, until `leave`.

        Raises `RateLimited`, or `InvalidRequest` if no call may have so many requests.
        """
        ...

    def leave(self) -> None:
        """Ends the counting of the call. The caller of `admit` calls it once, when the call has ended."""
        ...


class Access(Protocol):
    """Decides which calls are admitted."""

    async def admit(
        self,
        method: str,
        metadata: Metadata,
        end: Callable[[AccessRefused], object],
        *,
        counts: bool = True,
        takes_place: bool = True,
    ) -> AdmittedCall:
        """Admits a call, or raises an `AccessRefused`. The caller of this method calls `leave` when the call has
        ended.

        A call with `counts` False neither counts towards limits nor is limited. One with `takes_place` False counts
        towards the rate alone: another call holds its place among the concurrent ones. `end` ends the call if its
        token is revoked; it may be called before this method returns. Raises `SupervisorUnavailable` if another
        process counts calls and does not answer.
        """
        ...

    def namespaces(self) -> Mapping[str, str]:
        """Returns the namespace of each caller that may call now, by the caller's name."""
        ...

    def on_namespace_gone(self, callback: Callable[[str], None]) -> None:
        """Registers `callback`, which is called with each namespace whose last caller has lost its access."""
        ...

    def read_again(self) -> None:
        """Has `watch` read the rules again, also if they look unchanged."""
        ...

    async def watch(self) -> None:
        """Follows changes of the rules until cancelled."""
        ...


class OpenAccess:
    """Admits all calls of every method. Callers have no name, and share one namespace."""

    name = ""
    namespace = ""
    max_priority = Priority.NORMAL

    async def admit(
        self,
        method: str,
        metadata: Metadata,
        end: Callable[[AccessRefused], object],
        *,
        counts: bool = True,
        takes_place: bool = True,
    ) -> AdmittedCall:
        """Admits the call."""
        return self

    async def count_further(self, count: int) -> None:
        """Does nothing: requests are not counted."""

    def leave(self) -> None:
        """Does nothing: calls are not counted."""

    def namespaces(self) -> Mapping[str, str]:
        """Returns an empty mapping: callers have no names."""
        return _NO_NAMES

    def on_namespace_gone(self, callback: Callable[[str], None]) -> None:
        """Ignores `callback`: the one namespace stays."""

    def read_again(self) -> None:
        """Does nothing: there are no rules to read."""

    async def watch(self) -> None:
        """Returns at once: the rules never change."""


class TokenAccess:
    """Admits callers that bear a token of a file. Raises `TokenFileError` if the file cannot be read at first.

    `watch` follows the file. Belongs to one event loop.
    """

    def __init__(
        self,
        path: Path,
        limits: Limits | None = None,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Reads the file. `limits` counts the calls of tokens that have limits; by default this process counts
        them. `clock` returns the time by which tokens expire."""
        self._clock = clock
        self._limits: Limits = limits or TokenLimits()
        self._file = ReloadedFiles((path,), lambda: read_tokens(path))
        # The calls that run, by the hash of their token.
        self._calls: defaultdict[bytes, set[_TokenCall]] = defaultdict(set)
        self._tokens = self._file.value
        self._namespaces = _namespaces(self._tokens)
        self._callbacks: list[Callable[[str], None]] = []

    async def admit(
        self,
        method: str,
        metadata: Metadata,
        end: Callable[[AccessRefused], object],
        *,
        counts: bool = True,
        takes_place: bool = True,
    ) -> AdmittedCall:
        """Admits a call, or raises an `AccessRefused`."""
        token = self.identify(metadata)
        self.authorize(token, method)
        calls = self._calls[token.sha256]
        is_uncounted = counts and takes_place and token.limit is None
        call = _TokenCall(token, method, end, calls, is_uncounted=is_uncounted)
        # Before waiting for the limit, during which the token may be revoked.
        calls.add(call)
        if counts and token.limit is not None:
            try:
                call.counted = await self._limits.enter(token.limit, takes_place=takes_place)
                call.limit, call.limits = token.limit, self._limits
            except BaseException:
                calls.discard(call)
                raise
        return call

    def namespaces(self) -> Mapping[str, str]:
        """Returns the namespace of each token, by the token's name."""
        return self._namespaces

    def on_namespace_gone(self, callback: Callable[[str], None]) -> None:
        """Registers `callback`, which is called with each namespace that has lost its last token."""
        self._callbacks.append(callback)

    def identify(self, metadata: Metadata) -> Token:
        """Returns the token in the metadata, whatever its scopes. Raises `TokenInvalid`."""
        token = self._tokens.get(hash_of(_secret(metadata)))
        if token is None:
            raise TokenInvalid
        self._require_valid(token)
        return token

    def authorize(self, token: Token, method: str) -> None:
        """Raises `ScopeRequired` if the token does not allow the method."""
        scopes = required_scopes(method)
        if token.scopes.isdisjoint(scopes):
            raise ScopeRequired(scopes, token.name)

    def _require_valid(self, token: Token) -> None:
        if token.expires_at is not None and self._clock() >= token.expires_at:
            raise TokenInvalid(token.name, token.expires_at)

    def _end_expired(self) -> None:
        """Ends the calls whose token has expired."""
        for sha256, calls in list(self._calls.items()):
            try:
                self._require_valid(self._tokens[sha256])
            except TokenInvalid as refusal:
                for call in tuple(calls):
                    call.end(refusal)
            except KeyError:  # its calls have been ended
                continue

    def read_again(self) -> None:
        """Has `watch` read the file again, also if it looks unchanged."""
        self._file.read_again()

    async def watch(self) -> None:
        """Follows the file until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await self.reload()
            self._end_expired()

    async def reload(self) -> None:
        """Reads the file again if it has changed, and ends the calls that are no longer allowed."""
        if not await self._file.refresh_in_thread():
            return
        # Not in the thread: a call that is being admitted must see tokens and namespaces of the same file.
        former, tokens = self._tokens, self._file.value
        self._tokens = tokens
        _log.info("tokens: %s", changes(former, tokens))
        before, self._namespaces = self._namespaces, _namespaces(tokens)
        for sha256, calls in list(self._calls.items()):
            token = tokens.get(sha256)
            for call in tuple(calls):
                if token is None:
                    call.end(TokenInvalid(call.name))
                    continue
                if token.limit is not None and call.is_uncounted:
                    call.counted = self._limits.adopt(token.limit)
                    call.is_uncounted = False
                try:
                    self.authorize(token, call.method)
                except ScopeRequired as refusal:
                    call.end(refusal)
            if not calls:
                del self._calls[sha256]
        for namespace in set(before.values()) - set(self._namespaces.values()):
            for callback in self._callbacks:
                callback(namespace)


def changes(before: Mapping[bytes, Token], after: Mapping[bytes, Token]) -> str:
    """Returns a text that names the tokens which a file has in addition, no more, or with other settings."""
    old, new = ({token.name: token for token in tokens.values()} for tokens in (before, after))
    kinds = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
    }
    return "; ".join(f"{kind} {_listed(names)}" for kind, names in kinds.items() if names) or "none changed"


def _listed(names: Sequence[str]) -> str:
    num_hidden = len(names) - _MAX_LOGGED_NAMES
    return ", ".join(names[:_MAX_LOGGED_NAMES]) + (f" and {num_hidden} more" if num_hidden > 0 else "")


def required_scopes(method: str) -> frozenset[Scope]:
    """Returns the scopes for a method, one of which a token must have."""
    service = method[: method.rindex("/") + 1]
    return SCOPES.get(method) or SCOPES.get(service) or _ADMIN


def _namespaces(tokens: Mapping[bytes, Token]) -> Mapping[str, str]:
    """Returns the namespace of each token, by the token's name."""
    return {token.name: token.namespace for token in tokens.values()}


class _TokenCall:
    """Represents a running call of a token. `calls` are all running calls of that token."""

    __slots__ = (
        "_calls",
        "_further",
        "counted",
        "end",
        "is_uncounted",
        "limit",
        "limits",
        "max_priority",
        "method",
        "name",
        "namespace",
    )

    def __init__(
        self,
        token: Token,
        method: str,
        end: Callable[[AccessRefused], object],
        calls: set[_TokenCall],
        *,
        is_uncounted: bool,
    ) -> None:
        self.name = token.name
        self.namespace = token.namespace
        self.max_priority = token.max_priority
        self.method = method
        self.end = end
        self.is_uncounted = is_uncounted
        """True while the call is not counted because its token has no limit."""
        self.counted: CountedCall | None = None
        self.limit: TokenLimit | None = None
        """The limits of the token that the call was admitted with; None if it has none."""
        self.limits: Limits | None = None
        self._further: CountedCall | None = None
        self._calls = calls

    async def count_further(self, count: int) -> None:
        if self.limit is None or self.limits is None:
            return
        if exceeded := self.limit.never_allows(count + 1):
            raise InvalidRequest((Violation("objects", f"are {count + 1}, and this token may send {exceeded}"),))
        self._further = await self.limits.enter(self.limit, count)

    def leave(self) -> None:
        self._calls.discard(self)
        if self._further is not None:
            self._further.leave()
        if self.counted is not None:
            self.counted.leave()


def _secret(metadata: Metadata) -> str:
    """Returns the secret of the `authorization` header. Raises `TokenInvalid` unless there is exactly one.

    With two headers, a proxy may have checked one and the server the other.
    """
    values = [value for key, value in metadata if key == _AUTHORIZATION_KEY]
    if len(values) == 1 and isinstance(values[0], str) and values[0][: len(_SCHEME)].lower() == _SCHEME:
        return values[0][len(_SCHEME) :].strip()
    raise TokenInvalid
