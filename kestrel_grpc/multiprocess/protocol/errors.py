"""Sends errors to other processes: by the name of their class, with the arguments of its constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from kestrel_grpc.access.limits import RateLimited
from kestrel_grpc.images.stored_images import ImageHandle, ImageNotFound, ImageQuotaExceeded, ImageStoreFull
from kestrel_runtime.api import errors


class SupervisorUnavailable(errors.EngineUnavailable):
    """The other end of a link is gone, did not answer in time, or could not answer."""


class ProcessFault(Exception):
    """Stands for an exception inside another process, whose log has the details."""


class WireError(msgspec.Struct, array_like=True):
    """An error. Values are the arguments of its constructor; see `_ERRORS`."""

    name: str
    values: tuple[Any, ...]


class _Kind(NamedTuple):
    values_of: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Exception]


def _violations(pairs: Sequence[Sequence[str]]) -> tuple[errors.Violation, ...]:
    return tuple(errors.Violation(*pair) for pair in pairs)


_ERRORS: Mapping[type[Exception], _Kind] = MappingProxyType(
    {
        errors.InvalidRequest: _Kind(
            lambda error: (tuple((item.field, item.description) for item in error.violations),),
            lambda pairs: errors.InvalidRequest(_violations(pairs)),
        ),
        errors.ImageError: _Kind(
            lambda error: (error.violations[0].description, error.too_large, error.violations[0].field),
            lambda description, too_large, field: errors.ImageError(description, too_large=too_large, field=field),
        ),
        errors.ContextLengthExceeded: _Kind(
            lambda error: (
                error.violations[0].field,
                error.num_prompt_tokens,
                error.max_context_tokens,
                error.message_tokens,
            ),
            errors.ContextLengthExceeded,
        ),
        errors.ModelNotFound: _Kind(lambda error: (error.model, error.hint), errors.ModelNotFound),
        errors.AdapterNotFound: _Kind(lambda error: (error.name, error.hint), errors.AdapterNotFound),
        errors.AdapterInvalid: _Kind(
            lambda error: (error.name, error.problems),
            lambda name, problems: errors.AdapterInvalid(name, tuple(problems)),
        ),
        errors.SkillUnsupported: _Kind(lambda error: (error.skill, error.model), errors.SkillUnsupported),
        errors.Overloaded: _Kind(
            lambda error: (error.limit, error.retry_after_s, error.bound.value, error.is_tenant_share),
            lambda limit, retry_after_s, bound, is_share: errors.Overloaded(
                limit, retry_after_s, errors.QueueBound(bound), is_tenant_share=is_share
            ),
        ),
        errors.NumbersOverflowed: _Kind(lambda error: (error.adapter,), errors.NumbersOverflowed),
        errors.AnswerOutsideSchema: _Kind(lambda error: (error.place,), errors.AnswerOutsideSchema),
        errors.QueueTimeout: _Kind(lambda error: (error.waited_s,), errors.QueueTimeout),
        RateLimited: _Kind(lambda error: (error.name, error.limit, error.retry_after_s), RateLimited),
        ImageNotFound: _Kind(
            lambda error: (error.image_id,), lambda image_id: ImageNotFound(ImageHandle.require(image_id))
        ),
        ImageQuotaExceeded: _Kind(lambda error: (error.limit_bytes,), ImageQuotaExceeded),
        ImageStoreFull: _Kind(lambda error: (error.limit_bytes,), ImageStoreFull),
        errors.InternalError: _Kind(lambda error: (), lambda: errors.InternalError(ProcessFault())),
        **{
            kind: _Kind(lambda error: (str(error),), kind)
            for kind in (
                *(errors.RequestRefused, errors.ConstraintFailed, errors.DeadlineExceeded),
                *(errors.EngineUnavailable, SupervisorUnavailable),
            )
        },
    }
)
_ERROR_KINDS: Mapping[str, _Kind] = MappingProxyType({kind.__name__: entry for kind, entry in _ERRORS.items()})


def encode_known(error: Exception) -> WireError | None:
    """Encodes an error, or its base if that alone is in `_ERRORS`; returns None if neither is."""
    kind = next((kind for kind in type(error).__mro__ if kind in _ERRORS), None)
    return None if kind is None else WireError(kind.__name__, _ERRORS[kind].values_of(error))


def encode_error(error: Exception) -> WireError:
    """Encodes an error; one that is not in `_ERRORS` is an `InternalError`."""
    return encode_known(error) or WireError(errors.InternalError.__name__, ())


def decode_error(error: WireError) -> Exception:
    """Returns the error that was encoded."""
    return _ERROR_KINDS[error.name].make(*error.values)
