"""The routes of the REST API, one for each skill: their fields, and the requests that they make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_grpc.frontends.http.constraints import CONSTRAINT
from kestrel_grpc.frontends.http.fields import Field, Kind
from kestrel_grpc.frontends.rest.fields import (
    COMMON,
    IMAGE,
    IMAGE_URL,
    OBJECT,
    SETTINGS,
    SPATIAL_REFS,
    STREAM,
)
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.requests import (
    CAPTION_LENGTHS,
    Caption,
    Detect,
    Gaze,
    Point,
    PointRef,
    Query,
    Request,
    Segment,
)


@dataclass(frozen=True, slots=True)
class Route:
    """`POST /v1/<skill>`. `fields` are those of its body.

    `new_request` makes the request from the values of the body, and from what all routes read alike: `image`,
    `sampling` and `options`, and `spatial_refs` and `constraint` if they are among `fields`. A required field may
    be missing, which has been noted by then.
    """

    skill: str
    summary: str
    fields: tuple[Field, ...]
    new_request: Callable[..., Request]

    @property
    def needs_image(self) -> bool:
        """Whether there is no request without an image."""
        return IMAGE_URL in self.fields


def _query(values: Mapping[str, Any], **shared: Any) -> Query:
    return Query(question=values.get("question", "?"), reasoning=values.get("reasoning", False), **shared)


def _caption(values: Mapping[str, Any], **shared: Any) -> Caption:
    return Caption(length=values.get("length", "normal"), **shared)


def _point(values: Mapping[str, Any], **shared: Any) -> Point:
    return Point(object=values.get("object", "?"), max_objects=_max_objects(values), **shared)


def _detect(values: Mapping[str, Any], **shared: Any) -> Detect:
    return Detect(object=values.get("object", "?"), max_objects=_max_objects(values), **shared)


def _segment(values: Mapping[str, Any], **shared: Any) -> Segment:
    return Segment(object=values.get("object", "?"), **shared)


def _gaze(values: Mapping[str, Any], **shared: Any) -> Gaze:
    eye = values.get("eye", (0.0, 0.0))
    if len(eye) != 2 or not all(type(side) in (int, float) for side in eye):
        raise InvalidRequest((Violation("eye", "must be a list of two numbers"),))
    return Gaze(eye=PointRef(*eye), **shared)


def _max_objects(values: Mapping[str, Any]) -> int | None:
    return values.get("settings", {}).get("max_objects")


ROUTES = (
    Route(
        "query",
        "Answers a question, about an image or about nothing.",
        (
            Field("question", Kind.TEXT, "The question.", is_required=True),
            Field("image_url", Kind.IMAGE, f"{IMAGE} None: a question about no image."),
            Field("reasoning", Kind.BOOLEAN, "Whether the model reasons before it answers."),
            SPATIAL_REFS,
            CONSTRAINT,
            STREAM,
            SETTINGS,
            *COMMON,
        ),
        _query,
    ),
    Route(
        "caption",
        "Describes an image.",
        (
            IMAGE_URL,
            Field(
                "length", Kind.TEXT, "How long the description is; `normal` by default.", choices=CAPTION_LENGTHS
            ),
            STREAM,
            SETTINGS,
            *COMMON,
        ),
        _caption,
    ),
    Route("point", "Finds the places of objects.", (IMAGE_URL, OBJECT, SPATIAL_REFS, SETTINGS, *COMMON), _point),
    Route("detect", "Finds boxes around objects.", (IMAGE_URL, OBJECT, SPATIAL_REFS, SETTINGS, *COMMON), _detect),
    Route(
        "segment",
        "Finds the outline of an object.",
        (IMAGE_URL, OBJECT, SPATIAL_REFS, STREAM, SETTINGS, *COMMON),
        _segment,
    ),
    Route(
        "gaze",
        "Finds the place that somebody in the image looks at.",
        (
            IMAGE_URL,
            Field(
                "eye",
                Kind.LIST,
                "An eye of the one who looks, or the middle of both eyes: `[x, y]`, from 0 to 1.",
                is_required=True,
                item={"type": "number"},
            ),
            SETTINGS,
            *COMMON,
        ),
        _gaze,
    ),
)
