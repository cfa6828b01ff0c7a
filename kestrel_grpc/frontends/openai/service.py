"""OpenAI's routes, and how each is served."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kestrel_grpc.frontends.http.answers import rendered_events
from kestrel_grpc.frontends.http.endpoint import Answer, Group, Operation
from kestrel_grpc.frontends.http.exchange import Exchange
from kestrel_grpc.frontends.http.openapi import described, with_fields
from kestrel_grpc.frontends.openai import fields
from kestrel_grpc.frontends.openai.parsing import ParsedQuery, QueryParser
from kestrel_grpc.frontends.openai.rendering import (
    ChatRenderer,
    CompletionRenderer,
    failure_json,
    model_json,
    models_json,
)
from kestrel_grpc.wire.call_context import CallContext
from kestrel_grpc.wire.errors import CallFailure, MethodUnknown
from kestrel_grpc.wire.submission import Submission, last_event
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import ModelNotFound, did_you_mean

# Routes that clients of OpenAI know and that are refused by their name.
_REFUSED = ("/v1/responses", "/v1/embeddings", "/v1/images/generations", "/v1/moderations", "/v1/batches")


class OpenAiDialect:
    """Errors of OpenAI's API."""

    def authorization(self, exchange: Exchange) -> str | None:
        """There is no other header."""
        return None

    def failure(self, failure: CallFailure, request_id: str) -> bytes:
        return failure_json(failure)

    def failure_event(self, failure: CallFailure, request_id: str) -> bytes:
        return b"data: %b\n\n" % failure_json(failure)


class OpenAiService:
    """Chat and completions are queries of the engine. Each call is one request of the engine and ends with it."""

    def __init__(
        self, submission: Submission, engine: Engine, *, model_names: Sequence[str] = (), max_image_bytes: int
    ) -> None:
        """`model_names`: the names of the served model that callers are told; none for its own name."""
        self._submission = submission
        self._engine = engine
        self._models = tuple(model_names) or (engine.info.model,)
        self._model = self._models[0]
        self._started_s = int(time.time())
        parser = QueryParser(max_image_bytes)
        self.dialect = OpenAiDialect()
        self.operations: Sequence[Operation] = (
            Operation(
                "POST",
                "/v1/chat/completions",
                "openai/chat.completions",
                parser.chat,
                self._serving(ChatRenderer),
                field_name=fields.chat_name,
            ),
            Operation(
                "POST",
                "/v1/completions",
                "openai/completions",
                parser.completion,
                self._serving(CompletionRenderer),
                field_name=fields.completions_name,
            ),
            Operation("GET", "/v1/models", "openai/models", None, self._list_models, group=Group.OPERATIONS),
            Operation(
                "GET", "/v1/models/{model:path}", "openai/models", None, self._get_model, group=Group.OPERATIONS
            ),
            *(
                Operation("POST", path, "openai/models", None, _refusing(path), group=Group.OPERATIONS)
                for path in _REFUSED
            ),
        )
        self.descriptions: Mapping[str, Any] = _descriptions()

    def _serving(
        self, make_renderer: type[ChatRenderer] | type[CompletionRenderer]
    ) -> Callable[[ParsedQuery, CallContext], Awaitable[Answer]]:
        async def serve(parsed: ParsedQuery, call: CallContext) -> Answer:
            renderer = make_renderer(
                call.request_id, self._model, int(time.time()), includes_usage=parsed.includes_usage
            )
            is_streamed = parsed.is_streamed
            streams = await self._submission.submit_samples(parsed.query, parsed.image, call)
            del parsed  # and with it the image
            if is_streamed:
                return rendered_events(streams, renderer, call)
            return renderer.answer(await last_event(streams, call))

        return serve

    async def _list_models(self, _: object, call: CallContext) -> bytes:
        return models_json(self._models, await self._engine.adapter_names(), self._started_s)

    async def _get_model(self, parameters: Mapping[str, str], call: CallContext) -> bytes:
        name, known = parameters["model"], (*self._models, *await self._engine.adapter_names())
        if name not in known:
            raise ModelNotFound(name, did_you_mean(name, known))
        return model_json(name, self._models, self._started_s)


def _descriptions() -> Mapping[str, Any]:
    """The routes for the OpenAPI document."""
    failure = "A failure, in `error`: `message`, `type`, `param` and `code`."
    chat = described("createChatCompletion", "Answers a conversation about an image.", "The answer.", failure)
    completion = described("createCompletion", "Answers a text.", "The answer.", failure)
    one = described("retrieveModel", "Describes a model.", "The model.", failure)
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/chat/completions": {"post": with_fields(chat, fields.CHAT, streams=True)},
        "/v1/completions": {"post": with_fields(completion, fields.COMPLETIONS, streams=True)},
        "/v1/models": {"get": described("listModels", "Lists the models.", "The models.", failure)},
        "/v1/models/{model}": {"parameters": [name], "get": one},
    }


def _refusing(path: str) -> Callable[[object, CallContext], Awaitable[bytes]]:
    async def refuse(_: object, call: CallContext) -> bytes:
        raise MethodUnknown(path)

    return refuse
