"""Serves OpenAI's routes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kestrel_grpc.calls.call_context import CallContext, RequestSummary
from kestrel_grpc.calls.errors import CallFailure, MethodUnknown
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.frontends.http.answers import Renderer, serving
from kestrel_grpc.frontends.http.endpoint import Description, Group, Operation
from kestrel_grpc.frontends.http.exchange import Exchange
from kestrel_grpc.frontends.openai.embeddings import EmbeddingBody, parse_embeddings, serving_embeddings
from kestrel_grpc.frontends.openai.rendering import (
    ChatRenderer,
    CompletionRenderer,
    failure_json,
    model_json,
    models_json,
)
from kestrel_grpc.frontends.openai.requests import (
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)
from kestrel_grpc.frontends.openai.response_rendering import ResponseRenderer
from kestrel_grpc.frontends.openai.responses import ResponseBody, parse_response
from kestrel_grpc.frontends.openai.skills import split_skill
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import ModelNotFound

# Routes of OpenAI's clients that are refused by their name.
_REFUSED = ("/v1/images/generations", "/v1/moderations", "/v1/batches")


class OpenAiDialect:
    """Defines the errors of OpenAI's API."""

    failure_description = "A failure, in `error`: `message`, `type`, `param` and `code`."

    def authorizations(self, exchange: Exchange) -> Sequence[str]:
        """Returns nothing: only `authorization` holds a token."""
        return ()

    def failure(self, failure: CallFailure, request_id: str) -> bytes:
        return failure_json(failure)


class OpenAiService:
    """Serves chat and completions as queries of the engine. Each call is one request of the engine and ends with
    it."""

    def __init__(
        self, submission: Submission, engine: Engine, *, model_names: Sequence[str] = (), max_image_bytes: int
    ) -> None:
        """`model_names` are the names of the served model that callers see; none means the engine's name."""
        self._submission = submission
        self._engine = engine
        self._models = tuple(model_names) or (engine.info.model,)
        self._names = (*self._models, engine.info.model)
        self._started_s = int(time.time())
        self.dialect = OpenAiDialect()
        self.operations: Sequence[Operation] = (
            Operation(
                "POST",
                "/v1/chat/completions",
                "openai/chat.completions",
                partial(parse_chat, max_image_bytes, self._names),
                serving(submission, self._new_renderer_of(ChatRenderer)),
                description=Description("createChatCompletion", ChatBody.__doc__ or "", "The answer.", ChatBody),
            ),
            Operation(
                "POST",
                "/v1/completions",
                "openai/completions",
                parse_completion,
                serving(submission, self._new_renderer_of(CompletionRenderer)),
                description=Description(
                    "createCompletion", CompletionBody.__doc__ or "", "The answer.", CompletionBody
                ),
            ),
            Operation(
                "POST",
                "/v1/responses",
                "openai/responses",
                partial(parse_response, max_image_bytes, self._names),
                serving(submission, self._new_renderer_of(ResponseRenderer)),
                description=Description("createResponse", ResponseBody.__doc__ or "", "The answer.", ResponseBody),
            ),
            Operation(
                "POST",
                "/v1/embeddings",
                "openai/embeddings",
                partial(parse_embeddings, max_image_bytes),
                serving_embeddings(submission, self._models[0]),
                description=Description(
                    "createEmbedding", EmbeddingBody.__doc__ or "", "The embeddings.", EmbeddingBody
                ),
            ),
            Operation(
                "GET",
                "/v1/models",
                "openai/models",
                None,
                self._list_models,
                group=Group.OPERATIONS,
                description=Description("listModels", "Lists the models.", "The models."),
            ),
            Operation(
                "GET",
                "/v1/models/{model:path}",
                "openai/models",
                None,
                self._get_model,
                group=Group.OPERATIONS,
                description=Description("retrieveModel", "Describes a model.", "The model."),
            ),
            *(
                Operation("POST", path, "openai/models", None, _refusing(path), group=Group.OPERATIONS)
                for path in _REFUSED
            ),
        )

    def _new_renderer_of(
        self, kind: Callable[[str, str, int, Any], Renderer]
    ) -> Callable[[str, RequestSummary, Any], Renderer]:
        def new_renderer(request_id: str, request: RequestSummary, style: Any) -> Renderer:
            # The name in the list of models.
            model = request.adapter or self._models[0]
            return kind(request_id, model, int(time.time()), style)

        return new_renderer

    async def _list_models(self, _: object, call: CallContext) -> bytes:
        return models_json(self._models, await self._engine.adapter_names(), self._started_s)

    async def _get_model(self, parameters: Mapping[str, str], call: CallContext) -> bytes:
        name = parameters["model"]
        if not name:
            raise ModelNotFound(name)
        adapter = await self._submission.adapter_of(split_skill(name, self._names)[0])
        return model_json(name, self._started_s, parent=self._models[0] if adapter else None)


def _refusing(path: str) -> Callable[[object, CallContext], Awaitable[bytes]]:
    async def refuse(_: object, call: CallContext) -> bytes:
        raise MethodUnknown(path)

    return refuse
