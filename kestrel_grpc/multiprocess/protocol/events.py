"""Sends the events of requests from an engine core to front ends.

Types of `api` are sent as they are; structs of msgspec distinguish them where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from kestrel_grpc.multiprocess.protocol.errors import WireError, decode_error, encode_error
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    EmbedOutput,
    Event,
    Finished,
    FinishReason,
    FoundObject,
    Location,
    OutlineBox,
    Output,
    PatchEmbeddings,
    PointOutput,
    QueryOutput,
    SegmentOutput,
    Started,
    TextDelta,
    Timing,
    Usage,
)


class _Tagged(msgspec.Struct, array_like=True, tag=True):
    """The base of values of which there are several kinds."""


class _Query(_Tagged):
    output: QueryOutput


class _Caption(_Tagged):
    output: CaptionOutput


class _Point(_Tagged):
    output: PointOutput


class _Detect(_Tagged):
    output: DetectOutput


class _Segment(_Tagged):
    output: SegmentOutput


class _Embed(_Tagged):
    output: EmbedOutput


_WireOutput = _Query | _Caption | _Point | _Detect | _Segment | _Embed
_WIRE_OUTPUTS: Mapping[type[Output], Callable[[Any], _WireOutput]] = MappingProxyType(
    {
        QueryOutput: _Query,
        CaptionOutput: _Caption,
        PointOutput: _Point,
        DetectOutput: _Detect,
        SegmentOutput: _Segment,
        EmbedOutput: _Embed,
    }
)


class _Started(_Tagged):
    usage: Usage


class _Delta(_Tagged):
    delta: TextDelta


class _Box(_Tagged):
    box: OutlineBox


class _FoundBox(_Tagged):
    place: Box
    score: float | None


class _FoundPoint(_Tagged):
    place: Location
    score: float | None


class _Patches(_Tagged):
    patches: PatchEmbeddings


class _Finished(_Tagged):
    output: _WireOutput
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | None
    image_size_px: tuple[int, int] | None


_WireEvent = _Started | _Delta | _Box | _FoundBox | _FoundPoint | _Patches | _Finished


def _to_wire(event: Event) -> _WireEvent:
    if isinstance(event, TextDelta):
        return _Delta(event)
    if isinstance(event, Started):
        return _Started(event.usage)
    if isinstance(event, OutlineBox):
        return _Box(event)
    if isinstance(event, FoundObject):
        if isinstance(event.place, Box):
            return _FoundBox(event.place, event.score)
        return _FoundPoint(event.place, event.score)
    if isinstance(event, PatchEmbeddings):
        return _Patches(event)
    assert not event.alternatives, "an engine answers with one sample"
    output = _WIRE_OUTPUTS[type(event.output)](event.output)
    return _Finished(
        output, event.finish_reason, event.usage, event.timing, event.stop_sequence, event.image_size_px
    )


def _from_wire(event: _WireEvent) -> Event:
    if isinstance(event, _Delta):
        return event.delta
    if isinstance(event, _Started):
        return Started(event.usage)
    if isinstance(event, _Box):
        return event.box
    if isinstance(event, _FoundBox | _FoundPoint):
        return FoundObject(event.place, event.score)
    if isinstance(event, _Patches):
        return event.patches
    return Finished(
        event.output.output,
        event.finish_reason,
        event.usage,
        event.timing,
        event.stop_sequence,
        event.image_size_px,
    )


class EventsOf(msgspec.Struct, array_like=True):
    """The next events of one request; an error is the last."""

    id: int
    events: tuple[_WireEvent, ...]
    error: WireError | None = None


def events_of(id: int, events: Sequence[Event], error: KestrelError | None = None) -> EventsOf:
    """Encodes events of a request."""
    return EventsOf(id, tuple(map(_to_wire, events)), None if error is None else encode_error(error))


def events_in(item: EventsOf) -> tuple[list[Event], KestrelError | None]:
    """Decodes events of a request."""
    error = None if item.error is None else decode_error(item.error)
    assert error is None or isinstance(error, KestrelError)
    return list(map(_from_wire, item.events)), error
