"""The forty requests over HTTP: REST and OpenAI."""

import base64
from typing import Any

from kestrel_grpc.frontends.rest.requests import field_name
from tests.server.frontends.forty.cases import Ask
from tests.server.frontends.forty.columns import REQUEST_ID, Rig, Told
from tests.server.http_calls import Response

_CODES = {"invalid_api_key": "TOKEN_INVALID", "rate_limit_exceeded": "RATE_LIMITED"}


class _HttpColumn:
    """What both have in common."""

    name = ""
    has_http_statuses = True

    async def call(self, rig: Rig, ask: Ask) -> Told:
        response = await rig.http.ask(self.path(ask), self.body(ask), headers=_headers(ask))
        request_id = response.headers.get("x-request-id")
        if response.status != 200:
            delay = response.headers.get("retry-after-ms")
            assert (delay is None) is ("retry-after" not in response.headers)
            return Told(
                response.status,
                self.reason(response),
                fields=self.fields(response),
                request_id=request_id,
                retry_after_s=None if delay is None else int(delay) / 1000,
            )
        return Told(200, "OK", self.answer(ask, response), request_id=request_id)

    async def leave(self, rig: Rig, ask: Ask) -> None:
        async with rig.http.connect() as connection:
            await connection.send(self.path(ask), self.body(ask), headers=_headers(ask))
            await rig.engine.num_submitted.acquire()

    def path(self, ask: Ask) -> str:
        raise NotImplementedError

    def body(self, ask: Ask) -> dict[str, Any]:
        raise NotImplementedError

    def answer(self, ask: Ask, response: Response) -> dict[str, Any]:
        raise NotImplementedError

    def reason(self, response: Response) -> str:
        raise NotImplementedError

    def fields(self, response: Response) -> tuple[str, ...]:
        raise NotImplementedError


class RestColumn(_HttpColumn):
    """The REST API."""

    name = "rest"

    def expresses(self, ask: Ask) -> bool:
        return True

    def method(self, ask: Ask) -> str:
        return f"rest/{ask.skill}"

    def field_name(self, ask: Ask, name: str) -> str | None:
        return field_name(name)

    def path(self, ask: Ask) -> str:
        return f"/v1/{ask.skill}"

    def body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {"settings": {**ask.sampling}, "model": ask.model}
        if ask.skill == "embed":
            body["normalize"] = True
        elif ask.skill != "gaze":
            body[{"query": "question", "caption": "length"}.get(ask.skill, "object")] = ask.text
        if ask.image is not None:
            body["image_url"] = _url(ask.image)
        if ask.skill == "gaze":
            body["eye"] = ask.refs[0]
        elif ask.refs:
            body["spatial_refs"] = ask.refs
        if ask.max_objects is not None:
            body["settings"]["max_objects"] = ask.max_objects
        if ask.min_score is not None:
            body["min_score"] = ask.min_score
        if ask.objects:
            body["objects"] = list(ask.objects)
        if ask.reasoning:
            body["reasoning"] = True
        if ask.is_streamed:
            body["stream"] = True
        return body

    def answer(self, ask: Ask, response: Response) -> dict[str, Any]:
        found = response.json if not ask.is_streamed else response.events[-1]
        assert found["request_id"] == REQUEST_ID
        if ask.skill == "query":
            thought = found.get("reasoning")
            reasoning = {} if thought is None else {"reasoning": (thought["text"], _groundings(thought))}
            return {"answer": found["answer"], **reasoning}
        if ask.skill == "caption":
            return {"caption": found["caption"]}
        if ask.skill in ("point", "gaze"):
            return {"points": [(point["x"], point["y"]) for point in found["points"]]}
        if ask.objects:
            return {"groups": [(group["object"], list(map(_box, group["objects"]))) for group in found["groups"]]}
        if ask.skill == "embed":
            return {"mean": found["mean"]}
        if ask.skill == "detect":
            return {"boxes": [_box(item) for item in found["objects"]]}
        return {"path": found["path"], "box": _box(found["bbox"])}

    def reason(self, response: Response) -> str:
        error = response.json["error"]
        assert error["status"] == response.status
        assert error["request_id"] == response.headers["x-request-id"]
        return error["code"]

    def fields(self, response: Response) -> tuple[str, ...]:
        return tuple(item["field"] for item in response.json["error"].get("violations", ()))


class OpenAiColumn(_HttpColumn):
    """Chat completions, which have questions only, and embeddings."""

    name = "openai"

    def expresses(self, ask: Ask) -> bool:
        # Negative seeds are seeds here.
        return ask.skill in ("query", "embed") and not ask.refs and ask.sampling.get("seed", 0) >= 0

    def method(self, ask: Ask) -> str:
        return "openai/embeddings" if ask.skill == "embed" else "openai/chat.completions"

    def field_name(self, ask: Ask, name: str) -> str | None:
        renamed = {"sampling.max_tokens": "max_completion_tokens", "sampling.logprobs": "top_logprobs"}
        if name.startswith("sampling."):
            return renamed.get(name, name.removeprefix("sampling."))
        return "model" if name.startswith("options.") else "messages"

    def path(self, ask: Ask) -> str:
        return "/v1/embeddings" if ask.skill == "embed" else "/v1/chat/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        if ask.skill == "embed":
            assert ask.image is not None
            return {"model": ask.model, "input": _url(ask.image)}
        content: Any = ask.text
        if ask.image is not None:
            picture = {"type": "image_url", "image_url": {"url": _url(ask.image)}}
            content = [{"type": "text", "text": ask.text}, picture]
        sampling = dict(ask.sampling)
        if "max_tokens" in sampling:
            sampling["max_completion_tokens"] = sampling.pop("max_tokens")
        body = {"model": ask.model, "messages": [{"role": "user", "content": content}], **sampling}
        return {**body, "stream": ask.is_streamed, "reasoning": ask.reasoning}

    def answer(self, ask: Ask, response: Response) -> dict[str, Any]:
        if ask.skill == "embed":
            return {"mean": response.json["data"][0]["embedding"]}
        if not ask.is_streamed:
            message = response.json["choices"][0]["message"]
            if "reasoning" not in message:
                return {"answer": message["content"]}
            thought = (message["reasoning"], _groundings(message["reasoning_details"]))
            return {"answer": message["content"], "reasoning": thought}
        *chunks, done = response.events
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        answer: dict[str, Any] = {"answer": "".join(delta.get("content", "") for delta in deltas)}
        if ask.reasoning:  # a stream has the text alone
            text = "".join(delta.get("reasoning", "") for delta in deltas)
            answer["reasoning"] = (text, [(2, 6, [(0.5, 0.25)])])
        return answer

    def reason(self, response: Response) -> str:
        error: dict[str, str] = response.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return _CODES.get(error["code"], error["code"].upper())

    def fields(self, response: Response) -> tuple[str, ...]:
        """The first one only: the format holds one."""
        param = response.json["error"]["param"]
        return () if param is None else (param.partition("[")[0],)  # without the place in the list of messages


def _headers(ask: Ask) -> dict[str, str]:
    headers = {"X-Request-Id": REQUEST_ID}
    if ask.token is not None:
        headers["Authorization"] = f"Bearer {ask.token}"
    if ask.timeout_s is not None:
        headers["X-Request-Timeout"] = str(ask.timeout_s)
    return headers


def _url(image: bytes | str) -> str:
    return image if isinstance(image, str) else "data:image/png;base64," + base64.b64encode(image).decode()


def _groundings(thought: dict[str, Any]) -> list[Any]:
    return [
        (item["start_idx"], item["end_idx"], [tuple(point) for point in item["points"]])
        for item in thought["grounding"]
    ]


def _box(box: dict[str, float]) -> tuple[float, ...]:
    return box["x_min"], box["y_min"], box["x_max"], box["y_max"]
