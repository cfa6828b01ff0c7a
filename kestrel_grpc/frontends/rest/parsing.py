"""Converts JSON to the engine's requests, one function per route. Knows nothing about calls or the engine.

Violations of names and types are reported together with those that the request types find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kestrel_grpc.frontends.http.endpoint import renamed
from kestrel_grpc.frontends.http.fields import Field, read
from kestrel_grpc.frontends.http.images import PLACEHOLDER, GivenImage, read_image
from kestrel_grpc.frontends.http.json_body import parse_json
from kestrel_grpc.frontends.rest import fields
from kestrel_grpc.frontends.rest.fields import MOONDREAM, field_name
from kestrel_grpc.images.stored_images import ImageReference
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation
from kestrel_runtime.api.requests import (
    MAX_SPATIAL_REFS,
    BoxRef,
    CachePolicy,
    Caption,
    Detect,
    Point,
    PointRef,
    Priority,
    Query,
    Request,
    RequestOptions,
    SamplingParams,
    Segment,
    SpatialRef,
    too_many_spatial_refs,
)

ObjectRequestT = TypeVar("ObjectRequestT", Point, Detect, Segment)
_PLACEHOLDER_REF = PointRef(0.0, 0.0)
_NO_IMAGE = GivenImage(PLACEHOLDER)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """`image` names the image where `request.image` is a placeholder. `format` is one of `FORMATS`."""

    request: Request
    image: ImageReference | None
    is_streamed: bool
    format: str


class RequestParser:
    """`max_image_bytes` is the largest encoded image."""

    def __init__(self, max_image_bytes: int) -> None:
        self._max_image_bytes = max_image_bytes

    def query(self, body: bytes) -> ParsedRequest:
        """A question."""

        def construct(values: Mapping[str, Any], image: GivenImage | None, **shared: Any) -> Request:
            return Query(
                question=values.get("question", "?"),
                image=None if image is None else image.data,
                reasoning=values.get("reasoning", False),
                **shared,
            )

        return self._parsed(body, fields.QUERY, construct)

    def caption(self, body: bytes) -> ParsedRequest:
        """A description."""

        def construct(values: Mapping[str, Any], image: GivenImage | None, **shared: Any) -> Request:
            del shared["spatial_refs"]
            return Caption(image=(image or _NO_IMAGE).data, length=values.get("length", "normal"), **shared)

        return self._parsed(body, fields.CAPTION, construct)

    def point(self, body: bytes) -> ParsedRequest:
        """Places of objects."""
        return self._parsed(body, fields.OBJECTS, _about_objects(Point))

    def detect(self, body: bytes) -> ParsedRequest:
        """Boxes around objects."""
        return self._parsed(body, fields.OBJECTS, _about_objects(Detect))

    def segment(self, body: bytes) -> ParsedRequest:
        """The outline of an object."""
        return self._parsed(body, fields.SEGMENT, _about_objects(Segment))

    def _parsed(self, body: bytes, known: Iterable[Field], construct: Callable[..., Request]) -> ParsedRequest:
        """Raises `InvalidRequest` with all violations, those of names and types first, or an `ImageError`."""
        violations: list[Violation] = []
        values = read(known, parse_json(body), violations)
        refs = _spatial_refs(values.get("spatial_refs", ()), violations)
        image, image_error = None, None
        if "image_url" in values:
            try:
                image = read_image(values["image_url"], self._max_image_bytes)
            except ImageError as error:
                image, image_error = _NO_IMAGE, error
        try:
            request = construct(
                values, image, spatial_refs=refs, sampling=_sampling(values), options=_options(values)
            )
        except InvalidRequest as error:
            violations += renamed(error.violations, field_name)
            request = None
        if violations or request is None:
            raise InvalidRequest(
                (*violations, *(renamed(image_error.violations, field_name) if image_error else ()))
            )
        if image_error is not None:
            image_error.violations = renamed(image_error.violations, field_name)
            raise image_error
        return ParsedRequest(
            request,
            None if image is None else image.reference,
            values.get("stream", False),
            values.get("format", MOONDREAM),
        )


def _about_objects(kind: type[ObjectRequestT]) -> Callable[..., Request]:
    def construct(values: Mapping[str, Any], image: GivenImage | None, **shared: Any) -> Request:
        max_objects = None if kind is Segment else values.get("settings", {}).get("max_objects")
        return kind(
            object=values.get("object", "?"), image=(image or _NO_IMAGE).data, max_objects=max_objects, **shared
        )

    return construct


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    settings = values.get("settings", {})
    return SamplingParams(
        temperature=settings.get("temperature"),
        top_p=settings.get("top_p"),
        max_tokens=settings.get("max_tokens"),
        seed=settings.get("seed"),
    )


def _options(values: Mapping[str, Any]) -> RequestOptions:
    return RequestOptions(
        model=values.get("model", ""),
        max_queue_s=values.get("max_queue_seconds"),
        priority=Priority[values.get("priority", "normal").upper()],
        cache=CachePolicy[values.get("cache", "use").upper()],
    )


def _spatial_refs(items: Any, violations: list[Violation]) -> tuple[SpatialRef, ...]:
    if len(items) > MAX_SPATIAL_REFS:  # before each is looked at
        violations.append(too_many_spatial_refs())
        return ()
    refs: list[SpatialRef] = []
    for index, item in enumerate(items):
        if isinstance(item, list) and len(item) in (2, 4) and all(type(side) in (int, float) for side in item):
            refs.append(PointRef(*item) if len(item) == 2 else BoxRef(*item))
        else:
            violations.append(Violation(f"spatial_refs[{index}]", "must be a list of two or four numbers"))
            refs.append(_PLACEHOLDER_REF)  # keeps the indices of the following ones
    return tuple(refs)
