"""Checks who may call what, and how often, by the bearer tokens that `tokens.py` reads.

    TokenInvalid     no token, an unknown one, or one that was revoked
    ScopeRequired    the token does not allow this method
    RateLimited      the token has reached one of its limits

A token that is revoked while its calls run ends them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol

from kestrel_grpc.access.reloading import RELOAD_INTERVAL_S, ReloadedFiles
from kestrel_grpc.access.tokens import Scope, Token, hash_of, read_tokens
from kestrel_runtime.api.requests import Priority

Metadata = Iterable[tuple[str, str | bytes]]

_AUTHORIZATION_KEY = "authorization"
_SCHEME = "bearer "
# A guess: when another call of the token will end is not known.
_RETRY_CONCURRENT_S = 1.0
_ANY_SCOPE = frozenset(Scope)
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_INFER = frozenset((Scope.INFER,))
_IMAGES = frozenset((Scope.IMAGES,))
_ADMIN = frozenset((Scope.ADMIN,))

# By method or by service; one of the scopes is enough. What is not here needs the scope `admin`.
SCOPES: Mapping[str, frozenset[Scope]] = MappingProxyType(
    {
        "kestrel.v1.VisionService/": _INFER,
        "kestrel.v1.ImageService/": _IMAGES,
        "kestrel.v1.EngineService/GetServerInfo": _ANY_SCOPE,
        "kestrel.v1.EngineService/ListModels": _ANY_SCOPE,
        # It tells what all callers together do.
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
        "openai/": _INFER,
        "openai/models": _ANY_SCOPE,
        "http/openapi": _ANY_SCOPE,
        "http/metrics": _ADMIN,
    }
)


class AccessRefused(Exception):
    """The root of the refusals."""


class TokenInvalid(AccessRefused):
    """The call bears no token that is known."""


class ScopeRequired(AccessRefused):
    """The token is known but does not allow this method; it needs one of `scopes`."""

    def __init__(self, scopes: frozenset[Scope]) -> None:
        super().__init__()
        self.scopes = tuple(scope.value for scope in Scope if scope in scopes)


class RateLimited(AccessRefused):
    """The token has reached a limit, which `limit` describes. `name` is the name of the token in its file."""

    def __init__(self, name: str, limit: str, retry_after_s: float) -> None:
        super().__init__()
        self.name = name
        self.limit = limit
        self.retry_after_s = retry_after_s


class Access(Protocol):
    """Decides about calls."""

    def admit(
        self, method: str, metadata: Metadata, end: Callable[[AccessRefused], object], *, counts: bool = True
    ) -> AbstractContextManager[str]:
        """Entering admits a call and gives its caller's name, or raises `AccessRefused`; leaving ends the call.

        Where it does not count, it is not limited either. `end` ends the call, for a token that is revoked.
        """
        ...

    def namespace_of(self, name: str) -> str:
        """The namespace of a caller that has been admitted under this name."""
        ...

    def max_priority_of(self, name: str) -> Priority:
        """The highest priority that its requests have compared with those of other callers."""
        ...

    def namespaces(self) -> Mapping[str, str]:
        """The namespace of each caller that may call now, by the caller's name."""
        ...

    def on_namespace_gone(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with each namespace whose last caller may not call any more."""
        ...

    async def watch(self) -> None:
        """Follow changes of the rules until cancelled."""
        ...


class OpenAccess:
    """Allows all calls of every method. Callers have no name."""

    def __init__(self) -> None:
        self._anonymous = nullcontext("")

    def admit(
        self, method: str, metadata: Metadata, end: Callable[[AccessRefused], object], *, counts: bool = True
    ) -> AbstractContextManager[str]:
        """Admits."""
        return self._anonymous

    def namespace_of(self, name: str) -> str:
        """There is one namespace."""
        return ""

    def max_priority_of(self, name: str) -> Priority:
        """There are no other callers."""
        return Priority.NORMAL

    def namespaces(self) -> Mapping[str, str]:
        """No caller has a name."""
        return _NO_NAMES

    def on_namespace_gone(self, callback: Callable[[str], None]) -> None:
        """The one namespace stays."""

    async def watch(self) -> None:
        """Nothing changes."""


class TokenAccess:
    """Callers bear tokens from a file. Raises `TokenFileError` where that cannot be read at first.

    `watch` follows the file. Belongs to one event loop.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = ReloadedFiles((path,), lambda: read_tokens(path))
        self._clock = clock
        # By hash, so that a token whose limits change keeps what it has used.
        self._accounts: dict[bytes, _Account] = {}
        self._tokens = self._file.value
        self._namespaces = _namespaces(self._tokens)
        self._max_priorities = _max_priorities(self._tokens)
        self._callbacks: list[Callable[[str], None]] = []

    def admit(
        self, method: str, metadata: Metadata, end: Callable[[AccessRefused], object], *, counts: bool = True
    ) -> AbstractContextManager[str]:
        """Entering admits a call or raises an `AccessRefused`."""
        return _Admission(self, method, metadata, end, counts=counts)

    def namespace_of(self, name: str) -> str:
        """The namespace of the token of this name."""
        return self._namespaces[name]

    def max_priority_of(self, name: str) -> Priority:
        """What the line of the token of this name allows."""
        return self._max_priorities[name]

    def namespaces(self) -> Mapping[str, str]:
        """The namespace of each token, by the token's name."""
        return self._namespaces

    def on_namespace_gone(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with each namespace that has lost its last token."""
        self._callbacks.append(callback)

    def identify(self, metadata: Metadata) -> Token:
        """The token in the metadata, whatever its scopes. Raises `TokenInvalid`."""
        token = self._tokens.get(hash_of(_secret(metadata)))
        if token is None:
            raise TokenInvalid
        return token

    def authorize(self, token: Token, method: str) -> None:
        """Raise `ScopeRequired` where the token does not allow a method."""
        scopes = required_scopes(method)
        if token.scopes.isdisjoint(scopes):
            raise ScopeRequired(scopes)

    def account(self, token: Token) -> _Account:
        """The usage of the token."""
        account = self._accounts.get(token.sha256)
        if account is None:
            account = self._accounts[token.sha256] = _Account(token.burst, self._clock())
        return account

    def take(self, token: Token) -> None:
        """Count one call or raise `RateLimited`."""
        account = self.account(token)
        if token.concurrency is not None and account.num_counted >= token.concurrency:
            limit = f"at most {token.concurrency} requests at a time"
            raise RateLimited(token.name, limit, _RETRY_CONCURRENT_S)
        if token.rate is None:
            return
        wait_s = account.spend(token.rate, token.burst, self._clock())
        if wait_s > 0.0:
            limit = f"at most {token.rate:g} requests per second, and {token.burst} at once"
            raise RateLimited(token.name, limit, wait_s)

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await self.reload()

    async def reload(self) -> None:
        """Read the file again if it has changed, and end the calls that are no longer allowed."""
        if not await self._file.refresh_in_thread():
            return
        # Here, not in the thread: a call that is being admitted sees the tokens and their namespaces of one file.
        tokens = self._tokens = self._file.value
        before, self._namespaces = self._namespaces, _namespaces(tokens)
        self._max_priorities = _max_priorities(tokens)
        for sha256, account in list(self._accounts.items()):
            token = tokens.get(sha256)
            for admission in tuple(account.admissions):
                if token is None:
                    admission.end(TokenInvalid())
                    continue
                try:
                    self.authorize(token, admission.method)
                except ScopeRequired as refusal:
                    admission.end(refusal)
            if token is None:
                del self._accounts[sha256]
        for namespace in set(before.values()) - set(self._namespaces.values()):
            for callback in self._callbacks:
                callback(namespace)


def required_scopes(method: str) -> frozenset[Scope]:
    """The scopes of which a token needs one to call a method."""
    service = method[: method.rindex("/") + 1]
    return SCOPES.get(method) or SCOPES.get(service) or _ADMIN


def _namespaces(tokens: Mapping[bytes, Token]) -> Mapping[str, str]:
    """The namespace of each token, by its name."""
    return {token.name: token.namespace for token in tokens.values()}


def _max_priorities(tokens: Mapping[bytes, Token]) -> Mapping[str, Priority]:
    """What each token allows, by its name."""
    return {token.name: token.max_priority for token in tokens.values()}


class _Account:
    """The use of one token: a bucket of calls that fills at its rate, and the calls that run."""

    __slots__ = ("_level", "_level_at", "admissions", "num_counted")

    def __init__(self, level: float, now: float) -> None:
        self.admissions: set[_Admission] = set()
        self.num_counted = 0
        """Of these, the calls that count towards the concurrency."""
        self._level = float(level)
        self._level_at = now

    def spend(self, rate: float, burst: int, now: float) -> float:
        """Take one call out; where there is none, the seconds until there will be."""
        self._level = min(burst, self._level + (now - self._level_at) * rate)
        self._level_at = now
        if self._level < 1.0:
            return (1.0 - self._level) / rate
        self._level -= 1.0
        return 0.0


class _Admission(AbstractContextManager[str]):
    """One call of a token."""

    __slots__ = ("_access", "_account", "_counts", "_metadata", "end", "method")

    def __init__(
        self,
        access: TokenAccess,
        method: str,
        metadata: Metadata,
        end: Callable[[AccessRefused], object],
        *,
        counts: bool,
    ) -> None:
        self.method = method
        self.end = end
        self._counts = counts
        self._access = access
        self._metadata = metadata
        self._account: _Account | None = None

    def __enter__(self) -> str:
        token = self._access.identify(self._metadata)
        self._access.authorize(token, self.method)
        if self._counts:
            self._access.take(token)
        self._account = self._access.account(token)
        self._account.admissions.add(self)
        self._account.num_counted += self._counts
        return token.name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._account is not None
        self._account.admissions.discard(self)
        self._account.num_counted -= self._counts


def _secret(metadata: Metadata) -> str:
    """The token. There must be one header only: a proxy may have looked at another one than we would."""
    values = [value for key, value in metadata if key == _AUTHORIZATION_KEY]
    if len(values) == 1 and isinstance(values[0], str) and values[0][: len(_SCHEME)].lower() == _SCHEME:
        return values[0][len(_SCHEME) :].strip()
    raise TokenInvalid
