"""Converts JSON to the engine's requests.

Violations of names and types are reported together with those that the request types find.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_grpc.frontends.http.constraints import CONSTRAINT, read_constraint
from kestrel_grpc.frontends.http.endpoint import renamed
from kestrel_grpc.frontends.http.fields import read
from kestrel_grpc.frontends.http.images import PLACEHOLDER, GivenImage, read_image
from kestrel_grpc.frontends.http.json_body import parse_json
from kestrel_grpc.frontends.http.sampling import read_sampling
from kestrel_grpc.frontends.rest.fields import MOONDREAM, SPATIAL_REFS, field_name
from kestrel_grpc.frontends.rest.routes import Route
from kestrel_grpc.images.stored_images import ImageReference
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation
from kestrel_runtime.api.requests import (
    MAX_SPATIAL_REFS,
    BoxRef,
    CachePolicy,
    PointRef,
    Priority,
    Request,
    RequestOptions,
    SamplingParams,
    SpatialRef,
    too_many_spatial_refs,
)

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

    def parse(self, route: Route, body: bytes) -> ParsedRequest:
        """Raises `InvalidRequest` with all violations, those of names and types first, or an `ImageError`."""
        violations: list[Violation] = []
        values = read(route.fields, parse_json(body), violations)
        shared: dict[str, Any] = {"sampling": _sampling(values, violations), "options": _options(values)}
        if SPATIAL_REFS in route.fields:
            shared["spatial_refs"] = _spatial_refs(values.get("spatial_refs", ()), violations)
        if CONSTRAINT in route.fields:
            shared["constraint"] = read_constraint(values.get("constraint"), violations)
        image, image_error = None, None
        if "image_url" in values:
            try:
                image = read_image(values["image_url"], self._max_image_bytes)
            except ImageError as error:
                image, image_error = _NO_IMAGE, error
        given = _NO_IMAGE if image is None and route.needs_image else image
        try:
            request = route.new_request(values, image=None if given is None else given.data, **shared)
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


def _sampling(values: Mapping[str, Any], violations: list[Violation]) -> SamplingParams:
    settings = values.get("settings", {})
    if values.get("stream", False) and settings.get("n", 1) > 1:
        violations.append(Violation("settings.n", "must be 1 in a stream"))
    return SamplingParams(
        temperature=settings.get("temperature"),
        top_p=settings.get("top_p"),
        max_tokens=settings.get("max_tokens"),
        seed=settings.get("seed"),
        logprobs=settings.get("logprobs"),
        **read_sampling(settings, violations, "settings."),
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
