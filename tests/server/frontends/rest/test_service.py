"""The REST API over HTTP: shapes of requests, answers, streams and failures."""

import base64
import json
import struct
from typing import Any
from urllib.parse import quote

import pytest
from msgspec import structs

from kestrel_grpc.process.machine import processors
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import ContextLengthExceeded, Overloaded
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    Finished,
    FinishReason,
    SegmentMask,
    SegmentOutput,
    Started,
    TextChannel,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from kestrel_runtime.api.requests import (
    BoxRef,
    CachePolicy,
    Caption,
    Detect,
    Embed,
    Gaze,
    Point,
    PointRef,
    Priority,
    Query,
    Request,
    Segment,
)
from tests.fakes import HOLD, TIMING, FakeEngine, answers, fails
from tests.over_sockets import BOTH_CHANNELS
from tests.server.http_calls import IMAGE_BYTES, IMAGE_URL, HttpServing, serving_http

pytestmark = [pytest.mark.asyncio(loop_scope="module"), BOTH_CHANNELS]

METRICS = {
    "input_tokens": 735,
    "cached_tokens": 0,
    "output_tokens": 3,
    "prefill_time_ms": 500.0,
    "decode_time_ms": 250.0,
    "ttft_ms": 1500.0,
}
BOX = {"x_min": 0.125, "y_min": 0.25, "x_max": 0.5, "y_max": 0.75}


def with_metrics(**result: Any) -> dict[str, Any]:
    return {"request_id": "mine", "model": "fake", **result, "finish_reason": "stop", "metrics": METRICS}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"choices": ["yes", "no"]}, Constraint(choices=("yes", "no"))),
        ({"regex": "[0-9]+"}, Constraint(regex="[0-9]+")),
        ({"json_schema": {"enum": [1, "é", None]}}, Constraint(json_schema='{"enum": [1, "é", null]}')),
        (None, None),
    ],
)
async def test_a_query_takes_each_kind_of_constraint(rig: HttpServing, given: Any, expected: Constraint | None):
    assert (await rig.ask("/v1/query", {"question": "?", "constraint": given})).status == 200
    (query,) = rig.engine.requests
    assert isinstance(query, Query)
    assert query.constraint == expected


@pytest.mark.parametrize(
    ("route", "body", "result"),
    [
        ("query", {"question": "?"}, {"answer": "a kestrel"}),
        (
            "query",
            {"question": "?", "reasoning": True},
            {
                "answer": "a kestrel",
                "reasoning": {
                    "text": "A bird.",
                    "grounding": [{"start_idx": 2, "end_idx": 6, "points": [[0.5, 0.25]]}],
                },
            },
        ),
        ("caption", {"image_url": IMAGE_URL, "length": "short"}, {"caption": "a short kestrel"}),
        (
            "point",
            {"image_url": IMAGE_URL, "object": "bird"},
            {"points": [{"x": 0.5, "y": 0.25}, {"x": 0.75, "y": 0.5}]},
        ),
        ("detect", {"image_url": IMAGE_URL, "object": "bird"}, {"objects": [BOX]}),
        (
            "segment",
            {"image_url": IMAGE_URL, "object": "bird"},
            {"path": "M 0 0 L 1 1 z", "bbox": BOX, "partial": False},
        ),
        ("gaze", {"image_url": IMAGE_URL, "eye": [0.5, 0.25]}, {"points": [{"x": 0.25, "y": 0.75}]}),
    ],
)
async def test_every_route_answers_in_the_shape_of_the_moondream_client(rig: HttpServing, route, body, result):
    answer = await rig.ask(f"/v1/{route}", body, headers={"X-Request-Id": "mine"})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
    assert answer.json == with_metrics(**result)


async def test_an_embedding_has_its_mean_and_a_stream_its_patches(rig: HttpServing):
    body = {"image_url": IMAGE_URL, "normalize": True, "dtype": "float32"}
    answer = (await rig.ask("/v1/embed", body)).json
    assert (answer["mean"], answer["patch_count"], answer["metrics"]["input_tokens"]) == ([0.25, -0.5, 1.0], 3, 729)
    *pieces, last = (await rig.ask("/v1/embed", {**body, "stream": True})).events
    assert rig.engine.requests == [
        Embed(IMAGE_BYTES, patches=patches, normalize=True, dtype="float32") for patches in (False, True)
    ]
    assert [(piece["type"], piece["first_patch"], piece["patch_count"]) for piece in pieces] == [
        ("patches", 0, 2),
        ("patches", 2, 1),
    ]
    data = b"".join(base64.b64decode(piece["data"]) for piece in pieces)
    assert struct.unpack("<9f", data) == (1, -2, 0.5) * 3
    assert (last["type"], last["mean"], last["completed"]) == ("final", [0.25, -0.5, 1.0], True)


async def test_an_outline_has_the_form_that_is_asked_for_whole_and_streamed():
    async with serving_http(FakeEngine(outlined)) as rig:
        body = {"image_url": IMAGE_URL, "object": "bird"}
        plain = (await rig.ask("/v1/segment", body)).json
        for form, name in (("svg", None), ("polygon", "polygons"), ("rle", "rle"), ("png", "png")):
            whole = (await rig.ask("/v1/segment", {**body, "mask_format": form})).json
            *_, last = (await rig.ask("/v1/segment", {**body, "mask_format": form, "stream": True})).events
            assert whole.keys() - plain.keys() == ({name} if name else set())
            assert name is None or last[name] == whole[name]
        wanted = [Segment("bird", IMAGE_BYTES, mask_format=form) for form in ("svg", "polygon", "rle", "png")]
        assert rig.engine.requests[1::2] == rig.engine.requests[2::2] == wanted
        refused = await rig.ask("/v1/segment", {**body, "mask_format": "bmp"})
        assert [item["field"] for item in refused.json["error"]["violations"]] == ["mask_format"]


def outlined(request: Request) -> list[object]:
    """A script that finds a square in the middle of a picture of 40 x 20 pixels."""
    *events, last = answers(request)
    masks = (SegmentMask("M 0 0 H 1 V 1 H 0 Z", Box(0.25, 0.25, 0.75, 0.75)),)
    assert isinstance(last, Finished)
    assert isinstance(last.output, SegmentOutput)
    output = SegmentOutput(masks, last.output.mask_format)
    return [*events, structs.replace(last, output=output, image_size_px=(40, 20))]


async def test_an_embedding_has_no_adapter(rig: HttpServing):
    answer = await rig.ask("/v1/embed", {"image_url": IMAGE_URL, "model": "colours"})
    assert (answer.status, [item["field"] for item in answer.json["error"]["violations"]]) == (400, ["model"])


@pytest.mark.parametrize("name", ["colours", "fake/colours", "moondream3-preview/colours"])
async def test_answers_name_the_adapter_that_answered(rig: HttpServing, name: str):
    image, place = {"image_url": IMAGE_URL}, {"object": "bird"}
    routes: dict[str, dict[str, Any]] = {
        "query": {"question": "?"},
        "caption": image,
        "point": {**image, **place},
        "detect": {**image, **place},
        "segment": {**image, **place},
        "gaze": {**image, "eye": [0.5, 0.25]},
    }
    for route, body in routes.items():
        assert (await rig.ask(f"/v1/{route}", {**body, "model": name})).json["model"] == "fake/colours"
    streamed = await rig.ask("/v1/query", {"question": "?", "model": name, "stream": True})
    assert streamed.events[-1]["model"] == "fake/colours"


async def test_the_other_format_has_pairs_and_metrics_beside_the_answer(rig: HttpServing):
    body = {"image_url": IMAGE_URL, "object": "bird", "format": "kestrel"}
    answer = (await rig.ask("/v1/point", body)).json
    assert answer["points"] == [[0.5, 0.25], [0.75, 0.5]]
    assert "metrics" not in answer
    assert (answer["input_tokens"], answer["ttft_s"], answer["decode_tokens_per_s"]) == (735, 1.5, 8.0)


async def test_every_field_reaches_the_engine(rig: HttpServing):
    image = {"image_url": IMAGE_URL}
    settings = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 7, "max_objects": 3, "seed": 9}
    common = {
        "settings": settings,
        "model": "fake",
        "priority": "batch",
        "max_queue_seconds": 2.5,
        "cache": "bypass",
    }
    refs = {"spatial_refs": [[0.5, 0.25], [0.1, 0.2, 0.3, 0.4]]}
    for route, body in (
        ("query", {"question": "?", "reasoning": True, **refs}),
        ("caption", {"length": "long"}),
        ("point", {"object": "bird", **refs}),
        ("detect", {"object": "bird", **refs}),
        ("segment", {"object": "bird", **refs}),
    ):
        assert (await rig.ask(f"/v1/{route}", {**image, **common, **body})).status == 200
    query, caption, point, detect, segment = rig.engine.requests
    for request in rig.engine.requests:
        sampling, options = request.sampling, request.options
        assert request.images == (IMAGE_BYTES,)
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.25, 7, 9)
        assert (options.model, options.max_queue_s, options.priority) == ("fake", 2.5, Priority.BATCH)
        assert options.cache is CachePolicy.BYPASS
    expected = (PointRef(0.5, 0.25), BoxRef(0.1, 0.2, 0.3, 0.4))
    assert isinstance(query, Query)
    assert (query.reasoning, query.spatial_refs) == (True, expected)
    assert isinstance(caption, Caption)
    assert caption.length == "long"
    assert isinstance(point, Point)
    assert isinstance(detect, Detect)
    assert (point.max_objects, detect.max_objects, detect.spatial_refs) == (3, 3, expected)
    assert isinstance(segment, Segment)


async def test_streams_have_chunks_and_end_with_the_answer(rig: HttpServing):
    body = {"question": "?", "stream": True, "reasoning": True}
    answer = await rig.ask("/v1/query", body, headers={"X-Request-Id": "mine"})
    *chunks, last = answer.events
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine"
    assert "".join(chunk.get("chunk", "") for chunk in chunks) == "a kestrel"
    assert "".join(chunk.get("reasoning_chunk", "") for chunk in chunks) == "A bird."
    assert not any(chunk["completed"] for chunk in chunks)
    assert last["completed"]
    assert "chunk" not in last
    assert last["answer"] == "a kestrel"


@pytest.mark.one_process("events come one by one")
async def test_a_streamed_outline_has_the_three_kinds_of_events_of_the_client(rig: HttpServing):
    events = (await rig.ask("/v1/segment", {"object": "x", "image_url": IMAGE_URL, "stream": True})).events
    assert [event["type"] for event in events] == ["bbox", "path_delta", "final"]
    assert events[0]["bbox"] == BOX
    assert events[1]["chunk"] == events[2]["path"]


@pytest.mark.one_process("events come one by one")
@pytest.mark.parametrize("names", [(), ("bird", "branch")])
async def test_streamed_objects_come_one_by_one_and_then_the_whole_answer(rig: HttpServing, names: tuple[str, ...]):
    wanted = {"objects": list(names)} if names else {"object": "bird"}
    for skill, kind, style in (
        ("point", "point", "kestrel"),
        ("point", "point", "moondream"),
        ("detect", "bbox", ""),
    ):
        body = {**wanted, "image_url": IMAGE_URL, **({"format": style} if style else {})}
        whole = (await rig.ask(f"/v1/{skill}", body)).json
        *finds, last = (await rig.ask(f"/v1/{skill}", {**body, "stream": True})).events
        assert (last["type"], last["completed"]) == ("final", True)
        name = {"point": "points", "detect": "objects"}[skill]
        groups = [group[name] for group in whole["groups"]] if names else [whole[name]]
        assert {event["type"] for event in finds} == {kind}
        assert not any(event["completed"] for event in finds)
        sent = [[event[kind] for event in finds if event["index"] == index] for index in range(len(groups))]
        assert sent == groups
        assert last["groups" if names else name] == whole["groups" if names else name]


async def test_an_object_without_an_answer_ends_no_other_in_a_stream():
    def script(request: Request) -> list[object]:
        return [ContextLengthExceeded("object", 5, 4)] if request.text == "a" else list(answers(request))

    async with serving_http(FakeEngine(script)) as rig:
        body = {"image_url": IMAGE_URL, "stream": True}
        *_, last = (await rig.ask("/v1/detect", {**body, "objects": ["a", "b"]})).events
        alone = await rig.ask("/v1/detect", {**body, "objects": ["a"]})
    assert last["groups"][0]["error"]["code"] == "CONTEXT_LENGTH_EXCEEDED"
    assert last["groups"][1]["objects"] == [BOX]
    assert alone.status == 400
    assert alone.json["error"]["violations"][0]["field"] == "objects[0]"


async def test_every_violation_is_told_by_the_name_of_its_field(rig: HttpServing):
    body = {
        "question": 3,
        "image": "x",
        "image_url": "not base64!",
        "reasoning": "yes",
        "constraint": {"choices": ["a", 1], "regex": 2, "json_schema": "{}", "grammar": "x"},
        "settings": {"temperature": -1, "top_a": 5, "max_tokens": "many", "stop": [1, ""]},
        "spatial_refs": [[2, 0], "here", [0.5], [0.5, 2]],
        "model": None,
        "priority": "soon",
        "max_queue_seconds": -1,
    }
    answer = await rig.ask("/v1/query", body)
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["code"], error["status"]) == ("INVALID_REQUEST", 400)
    assert error["request_id"] == answer.headers["x-request-id"]
    assert {item["field"] for item in error["violations"]} == {
        "question",
        "image",
        "image_url",
        "reasoning",
        "constraint.choices[1]",
        "constraint.regex",
        "constraint.json_schema",
        "constraint.grammar",
        "settings.temperature",
        "settings.top_a",
        "settings.max_tokens",
        "settings.stop[0]",
        "settings.stop[1]",
        "spatial_refs[0][0]",
        "spatial_refs[1]",
        "spatial_refs[2]",
        "spatial_refs[3][1]",
        "priority",
        "max_queue_seconds",
    }


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("query", {"settings": {"stop": ""}}, "settings.stop"),
        ("query", {"settings": {"stop": ["", "a"]}}, "settings.stop[0]"),
        ("query", {"settings": {"seed": 2**64}}, "settings.seed"),
        ("query", {"settings": {"seed": -1}}, "settings.seed"),
        ("query", {"constraint": {"choices": ["a", ""]}}, "constraint.choices[1]"),
        ("gaze", {"image_url": IMAGE_URL, "eye": [0.5, 2]}, "eye[1]"),
        ("gaze", {"image_url": IMAGE_URL, "eye": [-1, 0]}, "eye[0]"),
        ("embed", {"image_url": IMAGE_URL, "dtype": "int8"}, "dtype"),
        ("embed", {"image_url": ""}, "image_url"),
        ("embed", {"image_url": IMAGE_URL, "settings": {"n": 2}}, "settings.n"),
    ],
)
async def test_errors_name_the_fields_that_were_sent(rig: HttpServing, route: str, body: Any, field: str):
    question = {"question": "?"} if route == "query" else {}
    error = (await rig.ask(f"/v1/{route}", {**question, **body})).json["error"]
    assert rig.engine.requests == []
    assert [item["field"] for item in error["violations"]] == [field]


async def test_a_model_with_the_name_of_no_adapter_is_not_found(rig: HttpServing):
    answer = await rig.ask("/v1/query", {"question": "?", "model": "fake/no name!"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"question": NaN}', "not valid JSON"),
        (b'{"question": "\xff"}', "not valid JSON"),
        (b'{"question": "\\ud800"}', "surrogate"),
        (b'{"question": ' + b"[" * 100_000, "nested"),
        (b'{"question": ' + b"1" * 5000 + b"}", "more than 400 digits"),
        (b"{}", "question: is required"),
        (b'{"question": null}', "question: is required"),
        (b'{"question": "%b"}' % (b"a" * 200_000), "at most 65536 bytes"),
        (b'{"question": "?", "x": [%b]}' % (b"{}," * 700_000 + b"{}"), "apart from its image"),
        (b'{"question": "?", "x": [%b]}' % (b'"",' * 100_000 + b'""'), "more than 20000 texts"),
    ],
    ids=range(13),
)
async def test_bodies_of_another_form_are_told_why(rig: HttpServing, body, told):
    answer = await rig.ask("/v1/query", body)
    assert answer.status == 400
    assert told in answer.json["error"]["message"]


async def test_a_large_image_arrives_whole(rig: HttpServing):
    image = bytes(range(251)) * 4000
    text = base64.b64encode(image).decode()
    lines = "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    bodies = [json.dumps({"image_url": url}) for url in (text, lines, f"data:;base64,{lines}", text.rstrip("="))]
    for written in (*bodies, bodies[0].replace("/", "\\/")):
        assert (await rig.ask("/v1/caption", written.encode())).status == 200
        assert rig.engine.requests[-1].images == (image,)


async def test_a_full_queue_is_a_status_and_not_an_event():
    for body in ({"question": "?"}, {"question": "?", "stream": True}):
        async with serving_http(FakeEngine(max_queued_requests=0)) as rig:
            answer = await rig.ask("/v1/query", body)
        assert answer.status == 429
        assert answer.headers["content-type"] == "application/json"
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "250")
        assert answer.json["error"]["code"] == "QUEUE_FULL"
    async with serving_http(FakeEngine(fails(Overloaded(3, 0.25)))) as rig:
        assert (await rig.ask("/v1/query", {"question": "?", "stream": True})).status == 429


async def test_a_failure_behind_the_first_event_ends_the_stream_with_an_error():
    def breaks(request: Any) -> list[object]:
        return [*answers(request)[:2], Overloaded(3, 0.25)]

    async with serving_http(FakeEngine(breaks)) as rig:
        answer = await rig.ask("/v1/query", {"question": "?", "stream": True})
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == "QUEUE_FULL"
    assert answer.events[-1]["completed"]


@pytest.mark.parametrize("num_blanks", [0, 300_000])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(is_streamed, num_blanks):
    def holds(request: Any) -> list[object]:
        return [*answers(request)[:2], HOLD]

    async with serving_http(FakeEngine(holds)) as rig:
        async with rig.connect() as connection:
            # Blanks make a body that the transport hands over in pieces.
            body = json.dumps({"question": "?", "stream": is_streamed}).encode() + b" " * num_blanks
            await connection.send("/v1/query", body)
            await rig.engine.num_submitted.acquire()
            if is_streamed:
                assert (await connection.head())[0] == 200
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 1


@pytest.mark.parametrize("eye", [[0.5], [0.5, "a"], [], [True, 0.5], [0.5, 0.5, 0.5]])
async def test_an_eye_is_two_numbers(rig: HttpServing, eye):
    answer = await rig.ask("/v1/gaze", {"image_url": IMAGE_URL, "eye": eye})
    assert (await rig.ask("/v1/gaze", {"image_url": IMAGE_URL, "eye": [1, 0]})).status == 200
    assert answer.status == 400
    assert [item["field"] for item in answer.json["error"]["violations"]] == ["eye"]
    assert rig.engine.requests == [Gaze(IMAGE_BYTES, PointRef(1, 0))]


def with_logprobs(request: Any) -> list[Any]:
    """A caption that ends at a stop string, with the logprobs of its token."""
    token = TokenLogprob(5, "a", b"a", -0.5, (TopLogprob(6, "b", b"b", -1.5),))
    end = Finished(
        CaptionOutput(f"a{request.sampling.seed}", (token,)),
        FinishReason.STOP_SEQUENCE,
        Usage(735, 729, 3),
        TIMING,
        "end",
    )
    return [Started(Usage(735, 729)), TextDelta("a", TextChannel.ANSWER, 0, 1, (token,)), end]


async def test_samples_logprobs_and_the_stop_string_are_told():
    told = {"text": "a", "bytes": [97], "logprob": -0.5, "token_id": 5}
    logprobs = [{**told, "top": [{"text": "b", "bytes": [98], "logprob": -1.5, "token_id": 6}]}]
    settings = {"stop": ["end"], "logprobs": 1, "seed": 3}
    body = {"image_url": IMAGE_URL, "settings": {**settings, "n": 2}}
    async with serving_http(FakeEngine(with_logprobs)) as rig:
        answer = (await rig.ask("/v1/caption", body)).json
        first, second = (request.sampling for request in rig.engine.requests)
        timed = (await rig.ask("/v1/caption", {**body, "format": "kestrel"})).json
        stream = await rig.ask("/v1/caption", {**body, "settings": settings, "stream": True})
        refused = await rig.ask("/v1/caption", {**body, "stream": True})
    assert (first.stop, first.logprobs, first.seed, first.n) == (("end",), 1, 3, None)
    shared = {"logprobs": logprobs, "finish_reason": "stop_sequence", "stop_sequence": "end"}
    assert {name: answer[name] for name in ("caption", *shared)} == {"caption": "a3", **shared}
    assert answer["alternatives"] == [{"caption": f"a{second.seed}", **shared}]
    assert answer["metrics"]["output_tokens"] == 6
    # Three tokens of the first sample, whose time it is: two come after the first one, in 0.25 s.
    assert (timed["output_tokens"], timed["decode_tokens_per_s"]) == (6, 8.0)
    assert stream.events[0] == {"chunk": "a", "logprobs": logprobs, "completed": False}
    assert stream.events[-1]["stop_sequence"] == "end"
    assert [item["field"] for item in refused.json["error"]["violations"]] == ["settings.n"]


async def test_the_server_describes_itself_as_over_grpc_but_with_an_admin_port():
    async with serving_http() as rig:
        said = (await rig.ask("/v1/server")).json
    assert (said["model"], said["dtype"], said["frontend_count"]) == ("fake", "float32", 0)
    assert [(engine["device"], engine["device_name"]) for engine in said["engines"]] == [("cpu", processors())]
    assert said["settings"]["prefix_cache"] == "on"
    assert "model" not in said["settings"]
    async with serving_http(admin_port=0) as rig:
        assert (await rig.ask("/v1/server")).status == 404


@pytest.mark.parametrize(
    ("route", "places"),
    [("detect", {"objects": [BOX]}), ("point", {"points": [{"x": 0.5, "y": 0.25}, {"x": 0.75, "y": 0.5}]})],
)
async def test_several_objects_have_groups_and_an_error_of_one_ends_no_other(route, places):
    def script(request):
        return [ContextLengthExceeded("object", 5000, 4096)] if request.text == "novel" else answers(request)

    async with serving_http(FakeEngine(script)) as rig:
        body = {"image_url": IMAGE_URL, "objects": ["bird", "novel", "car"]}
        answer = (await rig.ask(f"/v1/{route}", body, headers={"X-Request-Id": "mine"})).json
        failed = await rig.ask(f"/v1/{route}", {**body, "objects": ["novel"]})
    bird, novel, car = answer["groups"]
    assert bird == {"object": "bird", **places, "finish_reason": "stop"}
    assert car == {"object": "car", **places, "finish_reason": "stop"}
    assert (novel["object"], novel["error"]["code"], novel["error"]["status"]) == (
        "novel",
        "CONTEXT_LENGTH_EXCEEDED",
        400,
    )
    assert novel["error"]["violations"][0]["field"] == "objects[1]"
    assert answer.keys() == {"request_id", "model", "groups", "finish_reason", "metrics"}
    assert answer["metrics"]["input_tokens"] == 2 * 735
    assert (failed.status, failed.json["error"]["violations"][0]["field"]) == (400, "objects[0]")


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"object": "a", "objects": ["b"]}, ["object"]),
        ({"objects": ["a", "", 3]}, ["objects[2]", "objects[1]"]),
        ({"objects": ["a", " "], "settings": {"max_objects": 0}}, ["objects[1]", "settings.max_objects"]),
        ({"objects": ["a"] * 65}, ["objects"]),
        ({"objects": []}, ["object"]),
        ({}, ["object"]),
    ],
)
async def test_names_of_objects_that_make_no_sense_are_refused(rig: HttpServing, given: Any, fields: list[str]):
    answer = await rig.ask("/v1/detect", {"image_url": IMAGE_URL, **given})
    assert answer.status == 400
    assert [item["field"] for item in answer.json["error"]["violations"]] == fields


async def test_a_form_has_several_objects_as_a_list_in_json(rig: HttpServing):
    answer = await rig.ask(
        "/v1/detect?objects=" + quote('["bird", "car"]'), IMAGE_BYTES, headers={"Content-Type": "image/png"}
    )
    assert [group["object"] for group in answer.json["groups"]] == ["bird", "car"]
