"""Converts the events of a text stream to pieces and a result, for both clients. Knows no transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from kestrel_client import results
from kestrel_client.errors import Cancelled, Failure, ServerError
from kestrel_client.results import CaptionResult, QueryResult, TextDelta
from kestrel_client.v1 import vision_service_pb2

AnyResult = TypeVar("AnyResult", QueryResult, CaptionResult)
TextResponse = vision_service_pb2.QueryResponse | vision_service_pb2.CaptionResponse


class TextEvents(Generic[AnyResult]):
    """Reads one stream's events in order: `accept` each of them, then take the `result`."""

    def __init__(self, read: Callable[..., AnyResult]) -> None:
        self._read = read
        self._result: AnyResult | None = None

    def accept(self, response: TextResponse) -> TextDelta | None:
        """The piece of text in this event, or None if it is of another kind."""
        if response.HasField("delta"):
            return results.text_delta(response.delta)
        if response.HasField("completed"):
            self._result = self._read(response.completed)
        return None

    @property
    def result(self) -> AnyResult:
        """The whole result, once the stream has ended."""
        if self._result is None:
            raise ServerError(Failure(grpc.StatusCode.INTERNAL, "the stream ended without a result"))
        return self._result


def cancelled_here(request_id: str) -> Cancelled:
    """The error for reading a stream after cancelling it."""
    return Cancelled(Failure(grpc.StatusCode.CANCELLED, "the stream was cancelled", request_id=request_id))
