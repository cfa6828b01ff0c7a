"""The REST API: its routes, and how each is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kestrel_grpc.frontends.http.answers import rendered_events
from kestrel_grpc.frontends.http.endpoint import Answer, Operation
from kestrel_grpc.frontends.http.exchange import Exchange
from kestrel_grpc.frontends.rest.fields import field_name
from kestrel_grpc.frontends.rest.images import ImageRoutes
from kestrel_grpc.frontends.rest.openapi import descriptions
from kestrel_grpc.frontends.rest.parsing import ParsedRequest, RequestParser
from kestrel_grpc.frontends.rest.rendering import Renderer, failure_event, failure_json
from kestrel_grpc.frontends.rest.routes import ROUTES
from kestrel_grpc.images.intake import ImageIntake
from kestrel_grpc.wire.call_context import CallContext
from kestrel_grpc.wire.errors import CallFailure
from kestrel_grpc.wire.submission import Submission, last_event

_TOKEN_KEY = "x-moondream-auth"


class RestDialect:
    """Headers and errors of the REST API."""

    def authorization(self, exchange: Exchange) -> str | None:
        """Moondream's client sends its key in a header of its own."""
        token = exchange.header(_TOKEN_KEY)
        return None if token is None or exchange.header("authorization") is not None else f"Bearer {token}"

    def failure(self, failure: CallFailure, request_id: str) -> bytes:
        return failure_json(failure, request_id)

    def failure_event(self, failure: CallFailure, request_id: str) -> bytes:
        return failure_event(failure, request_id)


class RestService:
    """A route for each skill, each call of which is one request of the engine and ends with it, and stored images.

    Where `intake` is None no images are stored.
    """

    def __init__(
        self, submission: Submission, model: str, intake: ImageIntake | None, *, max_image_bytes: int
    ) -> None:
        self._submission = submission
        self._model = model
        parser = RequestParser(max_image_bytes)
        self.dialect = RestDialect()
        skills = tuple(
            Operation(
                "POST",
                f"/v1/{route.skill}",
                f"rest/{route.skill}",
                partial(parser.parse, route),
                self._serve,
                field_name=field_name,
            )
            for route in ROUTES
        )
        images = () if intake is None else ImageRoutes(intake, max_image_bytes=max_image_bytes).operations
        self.operations: Sequence[Operation] = (*skills, *images)
        self.descriptions: Mapping[str, Any] = descriptions(has_images=intake is not None)

    async def _serve(self, parsed: ParsedRequest, call: CallContext) -> Answer:
        renderer = Renderer(call.request_id, self._model, parsed.format)
        is_streamed = parsed.is_streamed
        streams = await self._submission.submit_samples(parsed.request, parsed.image, call)
        del parsed  # and with it the image
        if is_streamed:
            return rendered_events(streams, renderer, call)
        return renderer.answer(await last_event(streams, call))
