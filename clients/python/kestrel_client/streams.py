"""Converts the events of a stream to pieces and a result, for both clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from kestrel_client import results
from kestrel_client.errors import LOCAL_REASONS, RESULT_MISSING, Cancelled, Failure, ServerError
from kestrel_client.results import Box, CaptionResult, QueryResult, Segment, SegmentResult, TextDelta
from kestrel_client.v1 import vision_service_pb2

AnyResult = TypeVar("AnyResult", QueryResult, CaptionResult, SegmentResult)
AnyPiece = TypeVar("AnyPiece", TextDelta, Segment)
TextResponse = vision_service_pb2.QueryResponse | vision_service_pb2.CaptionResponse


class Events(ABC, Generic[AnyPiece, AnyResult]):
    """Reads one stream's events in order: `accept` each of them, then take the `result`."""

    def __init__(self, read: Callable[..., AnyResult]) -> None:
        self._read = read
        self._result: AnyResult | None = None

    def accept(self, response: Any) -> AnyPiece | None:
        """The piece of the answer in this event, or None if it is of another kind."""
        if response.HasField("completed"):
            self._result = self._read(response.completed)
            return None
        return self.piece(response)

    @property
    def result(self) -> AnyResult:
        """The whole result, once the stream has ended."""
        if self._result is None:
            text = "the stream ended without a result"
            raise ServerError(Failure(grpc.StatusCode.INTERNAL, text, RESULT_MISSING))
        return self._result

    @abstractmethod
    def piece(self, response: Any) -> AnyPiece | None:
        """The new text of an event that is not the last."""


class TextEvents(Events[TextDelta, AnyResult]):
    """The pieces are those of the text."""

    def piece(self, response: TextResponse) -> TextDelta | None:
        return results.text_delta(response.delta) if response.HasField("delta") else None


class OutlineEvents(Events[Segment, SegmentResult]):
    """The pieces are the outline as far as it has been drawn: first its box, then longer and longer paths."""

    def __init__(self, object: str) -> None:
        super().__init__(lambda message: results.segment_result(message, object))
        self._box: Box | None = None
        self._path = ""

    def piece(self, response: vision_service_pb2.StreamSegmentResponse) -> Segment | None:
        if response.HasField("box"):
            self._box = results.box(response.box)
        elif response.HasField("path_delta"):
            self._path += response.path_delta.text
        else:
            return None
        return None if self._box is None else Segment(self._path, self._box, is_partial=True)


def cancelled_here(request_id: str) -> Cancelled:
    """The error for reading a stream after cancelling it."""
    code = grpc.StatusCode.CANCELLED
    return Cancelled(Failure(code, "the stream was cancelled", LOCAL_REASONS[code], request_id=request_id))
