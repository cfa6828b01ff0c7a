"""Makes masks of outlines, in the forms that requests ask for, as the client makes them itself."""

from __future__ import annotations

from typing import NamedTuple

from kestrel_client.outlines import MaskTooLarge, png, polygons_in, run_length_counts
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.events import Finished, SegmentMask, SegmentOutput

Polygons = list[list[tuple[float, float]]]


class RunLengths(NamedTuple):
    """A mask in the compressed run-length encoding of COCO."""

    width_px: int
    height_px: int
    counts: str


class Forms(NamedTuple):
    """The further forms of an outline; those that the request does not ask for are None."""

    polygons: Polygons | None = None
    """The corners of the lines of the path, as fractions of the image."""
    run_lengths: RunLengths | None = None
    png: bytes | None = None


def forms_of(segment: SegmentMask, finished: Finished) -> Forms:
    """Returns the form of an outline that its request asks for. Raises `InvalidRequest` if it is too large.

    May take a second: `Finished.is_large` says so.
    """
    assert isinstance(finished.output, SegmentOutput), "asked about outlines"
    form, box = finished.output.mask_format, segment.box
    sides = (box.x_min, box.y_min, box.x_max, box.y_max)
    if form == "svg":
        return Forms()
    if form == "polygon":
        return Forms(polygons_in(segment.svg_path, sides, 1, 1))
    assert finished.image_size_px is not None, "an outline is that of an image"
    width_px, height_px = finished.image_size_px
    polygons = polygons_in(segment.svg_path, sides, width_px, height_px)
    try:
        if form == "png":
            return Forms(png=png(polygons, width_px, height_px))
        return Forms(run_lengths=RunLengths(width_px, height_px, run_length_counts(polygons, width_px, height_px)))
    except MaskTooLarge as error:
        raise InvalidRequest((Violation("mask_format", f"cannot be {form}: {error}"),)) from None
