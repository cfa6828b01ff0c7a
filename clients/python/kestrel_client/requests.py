"""Builds request messages from Python values, for both clients. Knows no transport; senders add the images."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar

from kestrel_client.images import StoredImage
from kestrel_client.results import Box, Point
from kestrel_client.v1 import generation_pb2, image_service_pb2, media_pb2, vision_service_pb2

Length = Literal["short", "normal", "long"]
"""The length of a caption."""

CachePolicy = Literal["use", "refresh", "bypass"]
"""What a request does with the server's caches: use and fill them, replace what they have, or neither."""

SpatialRef = Point | Box
"""A part of the image that a request speaks about."""

AnyQuery = TypeVar("AnyQuery", vision_service_pb2.QueryRequest, vision_service_pb2.CompleteQueryRequest)
AnyCaption = TypeVar("AnyCaption", vision_service_pb2.CaptionRequest, vision_service_pb2.CompleteCaptionRequest)


class CallOptions(TypedDict, total=False):
    """What every skill takes by keyword. Left out or None means the default of the server, or of the client.

    `temperature`, `top_p`, `max_tokens` and `seed` say how tokens are drawn; 0 is a value. The text ends before the
    first of the strings `stop`, or behind it with `include_stop`. `model` names a model. `cache` says what the
    request does with the server's caches. `max_queue_s` bounds the wait for a start, `timeout_s` the whole call.
    `request_id` names the request in the server's log.
    """

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    seed: int | None
    stop: Sequence[str] | None
    include_stop: bool | None
    model: str | None
    cache: CachePolicy | None
    max_queue_s: float | None
    timeout_s: float | None
    request_id: str | None


def query(
    kind: type[AnyQuery],
    question: str,
    reasoning: bool | None,
    spatial_refs: Sequence[SpatialRef],
    options: CallOptions,
) -> AnyQuery:
    """A question, as a message of `kind`."""
    message = kind(question=question, spatial_refs=_spatial_refs(spatial_refs), **_handling(options))
    if reasoning is not None:
        message.reasoning = reasoning
    return message


def caption(kind: type[AnyCaption], length: Length | None, options: CallOptions) -> AnyCaption:
    """A caption request, as a message of `kind`. Raises ValueError for a length that does not exist."""
    name = "UNSPECIFIED" if length is None else length.upper()
    return kind(length=f"CAPTION_LENGTH_{name}", **_handling(options))


def point(
    object: str, max_objects: int | None, spatial_refs: Sequence[SpatialRef], options: CallOptions
) -> vision_service_pb2.PointRequest:
    """Objects to point at."""
    return vision_service_pb2.PointRequest(
        object=object,
        max_objects=max_objects,
        spatial_refs=_spatial_refs(spatial_refs),
        **_handling(options),
    )


def detect(
    object: str, max_objects: int | None, spatial_refs: Sequence[SpatialRef], options: CallOptions
) -> vision_service_pb2.DetectRequest:
    """Objects to put a box around."""
    return vision_service_pb2.DetectRequest(
        object=object,
        max_objects=max_objects,
        spatial_refs=_spatial_refs(spatial_refs),
        **_handling(options),
    )


def segment(
    object: str, spatial_refs: Sequence[SpatialRef], options: CallOptions
) -> vision_service_pb2.SegmentRequest:
    """An object to outline."""
    return vision_service_pb2.SegmentRequest(
        object=object, spatial_refs=_spatial_refs(spatial_refs), **_handling(options)
    )


def put_image(data: bytes, ttl_s: float | None, pin: bool) -> image_service_pb2.PutImageRequest:
    """An image to store."""
    ttl = None if ttl_s is None else timedelta(seconds=ttl_s)
    return image_service_pb2.PutImageRequest(data=data, ttl=ttl, pin=pin)


def image_id(image: str | StoredImage) -> str:
    """The name of a stored image."""
    return image.image_id if isinstance(image, StoredImage) else image


def timeout_s(options: CallOptions, default_s: float) -> float:
    """How long the whole call may take."""
    asked_s = options.get("timeout_s")
    return default_s if asked_s is None else asked_s


def metadata(options: CallOptions, token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that is sent with the message."""
    request_id = options.get("request_id")
    named = () if request_id is None else (("x-request-id", request_id),)
    return named if token is None else (*named, ("authorization", f"Bearer {token}"))


def _handling(options: CallOptions) -> dict[str, Any]:
    """The fields `sampling` and `options`, which all requests share."""
    unknown = options.keys() - CallOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument: {', '.join(sorted(unknown))}")
    max_queue_s = options.get("max_queue_s")
    cache = options.get("cache")
    return {
        "sampling": _sampling(options),
        "options": generation_pb2.RequestOptions(
            model=options.get("model"),
            cache=None if cache is None else f"CACHE_POLICY_{cache.upper()}",
            max_queue_duration=None if max_queue_s is None else timedelta(seconds=max_queue_s),
        ),
    }


def _sampling(options: CallOptions) -> generation_pb2.SamplingParams:
    """How tokens are drawn and when the text ends."""
    sampling = generation_pb2.SamplingParams(
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        max_tokens=options.get("max_tokens"),
        seed=options.get("seed"),
        stop=_strings(options.get("stop")),
    )
    include_stop = options.get("include_stop")
    if include_stop is not None:
        sampling.include_stop = include_stop
    return sampling


def _strings(given: Sequence[str] | None) -> Sequence[str]:
    """Strings, of which a single one may come without a list."""
    return [given] if isinstance(given, str) else given or ()


def _spatial_refs(refs: Sequence[SpatialRef]) -> list[media_pb2.SpatialRef]:
    return [_spatial_ref(ref) for ref in refs]


def _spatial_ref(ref: SpatialRef) -> media_pb2.SpatialRef:
    if isinstance(ref, Point):
        return media_pb2.SpatialRef(point=media_pb2.NormalizedPoint(x=ref.x, y=ref.y))
    box = media_pb2.NormalizedBox(x_min=ref.x_min, y_min=ref.y_min, x_max=ref.x_max, y_max=ref.y_max)
    return media_pb2.SpatialRef(box=box)
