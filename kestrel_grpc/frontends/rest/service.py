"""Serves the REST API: a route for each skill, routes for stored images, and one that describes the server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kestrel_grpc.calls.call_context import RequestSummary
from kestrel_grpc.calls.errors import CallFailure
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.frontends.http.answers import serving
from kestrel_grpc.frontends.http.endpoint import Description, Operation
from kestrel_grpc.frontends.http.exchange import Exchange
from kestrel_grpc.frontends.rest.images import ImageRoutes
from kestrel_grpc.frontends.rest.rendering import Renderer, failure_json
from kestrel_grpc.frontends.rest.requests import ROUTES, Format, parse_request
from kestrel_grpc.frontends.rest.server_route import ServerRoute
from kestrel_grpc.images.image_store import ImageIntake

_TOKEN_KEY = "x-moondream-auth"


class RestDialect:
    """Defines headers and errors of the REST API."""

    failure_description = "A failure, in `error`: `code`, `message`, `status`, `request_id` and `violations`."

    def authorizations(self, exchange: Exchange) -> Sequence[str]:
        """Returns the key that Moondream's client sends in a header of its own."""
        return [f"Bearer {value}" for name, value in exchange.headers if name == _TOKEN_KEY]

    def failure(self, failure: CallFailure, request_id: str) -> bytes:
        return failure_json(failure, request_id)


class RestService:
    """Serves the routes. Each call of a skill is one request of the engine and ends with it.

    If `intake` is None no images are stored. If `server` is None no route describes the server.
    """

    def __init__(
        self,
        submission: Submission,
        model: str,
        intake: ImageIntake | None,
        server: ServerRoute | None,
        *,
        max_image_bytes: int,
    ) -> None:
        def new_renderer(request_id: str, request: RequestSummary, style: Format) -> Renderer:
            return Renderer(request_id, request.model(model), style)

        serve = serving(submission, new_renderer, Renderer.groups)
        self.dialect = RestDialect()
        skills = [
            Operation(
                "POST",
                f"/v1/{skill}",
                f"rest/{skill}",
                partial(parse_request, body, max_image_bytes),
                serve,
                takes_forms="image_url" in body.model_fields,
                description=Description(skill, body.__doc__ or "", "The answer.", body),
            )
            for skill, body in ROUTES.items()
        ]
        images = () if intake is None else ImageRoutes(intake, max_image_bytes=max_image_bytes).operations
        self.operations: Sequence[Operation] = (*skills, *images, *(() if server is None else (server.operation,)))
