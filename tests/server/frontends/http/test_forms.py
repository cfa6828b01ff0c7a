"""Forms in place of JSON: what a browser and curl send becomes the same request, and nothing else is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.requests import Caption, Detect, Embed, Gaze, Point, PointRef, Priority, Query, Segment
from tests.fakes import FakeEngine
from tests.server.frontends.http.test_frontend import bearer, tokens_in
from tests.server.http_calls import IMAGE_BYTES, IMAGE_URL, HttpServing, Response, serving_http

pytestmark = pytest.mark.asyncio(loop_scope="module")

PICTURE = b"\x89PNG\r\n\x1a\n--b\r\n\r\n--\x00\xff\r\n-" + IMAGE_BYTES
"""A file with line breaks and what resembles a boundary."""
FILE = 'Content-Disposition: form-data; name="image"; filename="a;\\"b\\".png"\r\nContent-Type: image/png'
SKILLS: list[tuple[str, dict[str, str], type[Any]]] = [
    ("query", {"question": "?"}, Query),
    ("caption", {"length": "short"}, Caption),
    ("point", {"object": "bird"}, Point),
    ("detect", {"object": "bird"}, Detect),
    ("segment", {"object": "bird"}, Segment),
    ("gaze", {"eye": "[0.5, 0.25]"}, Gaze),
    ("embed", {"normalize": "true"}, Embed),
]


def text(name: str, value: str = "") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"', value.encode()


def form(*parts: tuple[str, bytes], end: bytes = b"--\r\n", boundary: str = "Bird-7") -> bytes:
    delimiter = f"--{boundary}".encode()
    pieces = (delimiter + b"\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts)
    return b"".join(pieces) + delimiter + end


async def post(rig: HttpServing, route: str, body: bytes, kind: str = "Bird-7", **headers: str) -> Response:
    given = {"Content-Type": f"multipart/form-data; boundary={kind}", **headers}
    return await rig.ask(f"/v1/{route}", body, headers=given)


@pytest.mark.parametrize(("route", "fields", "kind"), SKILLS)
async def test_every_skill_takes_a_form_and_a_picture_alone(rig: HttpServing, route, fields, kind):
    parts = [(FILE, PICTURE), *(text(name, value) for name, value in fields.items())]
    asked = await post(rig, route, form(*parts))
    query = "&".join(f"{name}={value.replace(' ', '+')}" for name, value in fields.items())
    alone = await rig.ask(f"/v1/{route}?{query}", PICTURE, headers={"Content-Type": "image/png"})
    assert (asked.status, alone.status) == (200, 200), (asked.body, alone.body)
    first, second = rig.engine.requests
    assert isinstance(first, kind)
    assert first.images == second.images == (PICTURE,)
    assert first == second


async def test_texts_become_the_values_that_json_would_have(rig: HttpServing):
    fields = {
        "question": "5",
        "stream": "false",
        "spatial_refs": "[[0.5, 0.25]]",
        "settings.temperature": "0.5",
        "settings.max_tokens": "7",
        "settings.stop": '["a", "b"]',
        "settings.seed": "",
        "constraint": '{"choices": ["é", "no"]}',
        "priority": "batch",
        "max_queue_seconds": "null",
    }
    document = {
        "question": "5",
        "image_url": IMAGE_URL,
        "spatial_refs": [[0.5, 0.25]],
        "settings": {"temperature": 0.5, "max_tokens": 7, "stop": ["a", "b"]},
        "constraint": {"choices": ["é", "no"]},
        "priority": "batch",
    }
    parts = [*(text(name, value) for name, value in fields.items()), (FILE, IMAGE_BYTES)]
    assert (await post(rig, "query", form(*parts))).status == 200
    assert (await rig.ask("/v1/query", document)).status == 200
    first, second = rig.engine.requests
    assert isinstance(first, Query)
    assert first == second
    assert (first.constraint, first.options.priority) == (Constraint(choices=("é", "no")), Priority.BATCH)


@pytest.mark.parametrize(
    ("given", "stop"),
    [("[END]", ("[END]",)), ("5", ("5",)), ('"a"', ('"a"',)), ('["a"]', ("a",)), ("\r\n", ("\r\n",))],
)
async def test_a_stop_string_is_a_text_unless_it_is_a_list(rig: HttpServing, given: str, stop: Any):
    answer = await post(rig, "query", form(text("question", "?"), text("settings.stop", given)))
    assert answer.status == 200
    assert rig.engine.requests[0].sampling.stop == stop


@pytest.mark.parametrize(
    "head",
    [
        'Content-Disposition: form-data; name="image"; filename="blob"',
        "content-disposition:form-data;name=image;filename=x.png",
        "Content-Disposition: form-data; filename*=UTF-8''%e2%82%ac.png; name=\"image\"",
        'Content-Disposition: form-data; name="image"\r\nContent-Type: application/octet-stream',
        'Content-Disposition: form-data; name="image_url"; filename="x.png"\r\nContent-Transfer-Encoding: binary',
        'Content-Disposition: form-data; name="image"; filename="C:\\x\\"\r\nContent-Length: 3',
    ],
)
async def test_a_part_is_a_file_however_clients_name_it(rig: HttpServing, head: str):
    body = form((head, PICTURE), boundary="a b'()+_,-./:=?c")
    answer = await post(rig, "caption", body, '"a b\'()+_,-./:=?c"; charset=utf-8')
    assert answer.status == 200, answer.body
    assert rig.engine.requests[0].images == (PICTURE,)


async def test_a_picture_may_be_a_text_as_in_json(rig: HttpServing):
    for name in ("image", "image_url"):
        assert (await post(rig, "caption", form(text(name, IMAGE_URL)))).status == 200
    empty = 'Content-Disposition: form-data; name="image"; filename=""\r\nContent-Type: application/octet-stream'
    assert (await post(rig, "query", form((empty, b""), text("question", "?")))).status == 200
    assert [request.images for request in rig.engine.requests] == [(IMAGE_BYTES,), (IMAGE_BYTES,), ()]


async def test_an_address_may_have_bytes_of_utf_8_with_and_without_escapes(rig: HttpServing):
    headers = {"Content-Type": "application/octet-stream"}
    assert (await rig.ask("/v1/query?question=%C3%A9+%26", IMAGE_BYTES, headers=headers)).status == 200
    assert rig.engine.requests[0].text == "é &"
    answer = await rig.ask("/v1/query?question=%ff", IMAGE_BYTES, headers=headers)
    assert answer.json["error"]["violations"] == [{"field": "question", "description": "is not text in UTF-8"}]


async def test_a_refusal_lists_everything_that_is_wrong_with_a_form(rig: HttpServing):
    parts = [
        text("object", "bird"),
        text("object", "plane"),
        text("settings.temperature", "warm"),
        text("settings.max_objects", "1.5"),
        text("settings.colour", "red"),
        text("stream", "yes"),
        text("colour", "red"),
        text("priority", "high"),
        text("spatial_refs", "[[1]]"),
    ]
    answer = await post(rig, "segment", form(*parts))
    assert answer.status == 400
    assert {item["field"]: item["description"] for item in answer.json["error"]["violations"]} == {
        "object": "is given more than once",
        "image": "is required",
        "settings.temperature": "must be a number",
        "settings.max_objects": "must be a whole number",
        "settings.colour": "is not a field of this request",
        "stream": "must be true or false",
        "colour": "is not a field of this request",
        "priority": "must be one of interactive, normal, batch",
        "spatial_refs[0]": "must be a list of two or four numbers",
    }
    assert rig.engine.requests == []


@pytest.mark.parametrize(
    ("parts", "field", "description"),
    [
        ([(FILE, b"x"), (FILE, b"y")], "image", "is a second picture"),
        ([(FILE, b"x"), text("image_url", IMAGE_URL)], "image_url", "is a second picture"),
        (
            [(FILE, b"x"), text("settings", "{}"), text("settings.n", "1"), text("settings.n", "1")],
            "settings.n",
            "",
        ),
        ([(FILE, b"x"), text("settings", "5"), text("settings.n", "1")], "settings.n", "is given more than once"),
        ([text("image", "#")], "image", "is not base64"),
    ],
)
async def test_what_is_given_twice_or_is_no_picture_is_named(
    rig: HttpServing, parts: Any, field: str, description: str
):
    answer = await post(rig, "caption", form(*parts))
    assert answer.status == 400
    found = {item["field"]: item["description"] for item in answer.json["error"]["violations"]}
    assert description in found[field]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"preamble\r\n" + form((FILE, b"x")),
        form((FILE, b"x"))[:-4],
        form((FILE, b"x"))[:-12],
        form((FILE, b"x"), end=b"--\r\nepilogue"),
        form((FILE, b"x"), end=b"-\r\n"),
        form((FILE, b"x")).replace(b"\r\n", b"\n"),
        form(("", b"x")),
        form(("Content-Type: image/png", b"x")),
        form((f"{FILE}\r\n{FILE}", b"x")),
        form((f"{FILE}\r\n folded", b"x")),
        form((f"{FILE}\r\nX: {'a' * 4096}", b"x")),
        form((f"{FILE}\r\nContent-Transfer-Encoding: base64", b"eA==")),
        form(('Content-Disposition: attachment; name="image"', b"x")),
        form(('Content-Disposition: form-data; name="image"; name="question"', b"x")),
        form(('Content-Disposition: form-data; name="image', b"x")),
        form(*[text(f"field{number}") for number in range(33)]),
        form(text("question", "?"), text("spatial_refs", "[" * 2**20 + "]")),
        form(text("question", "?"), text("constraint", '"' * 40_002)),
    ],
)
async def test_what_is_no_form_is_refused_in_one_sentence(rig: HttpServing, body: bytes):
    answer = await post(rig, "query", body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "INVALID_REQUEST")
    assert len(answer.json["error"]["violations"]) == 1
    assert rig.engine.requests == []


@pytest.mark.parametrize("kind", ["", '""', "a" * 71, '"a@b"', "a; boundary=b", '"a "'])
async def test_a_boundary_that_cannot_be_one_is_refused(rig: HttpServing, kind: str):
    answer = await post(rig, "caption", form((FILE, b"x"), boundary="a"), kind)
    assert [item["field"] for item in answer.json["error"]["violations"]] == ["content-type"]


async def test_as_many_parts_as_are_allowed_are_read(rig: HttpServing):
    answer = await post(rig, "query", form(*[text(f"field{number}") for number in range(32)]))
    assert len(answer.json["error"]["violations"]) == 21  # the first twenty, and how many more


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/mixed"])
async def test_other_bodies_are_refused_with_what_is_accepted(rig: HttpServing, media_type: str):
    answer = await rig.ask("/v1/caption", IMAGE_BYTES, headers={"Content-Type": media_type})
    assert (answer.status, answer.json["error"]["code"]) == (415, "MEDIA_TYPE_UNSUPPORTED")
    assert "multipart/form-data or image/…" in answer.json["error"]["message"]


async def test_a_form_is_bounded_as_every_message_and_its_picture_as_every_picture():
    async with serving_http(FakeEngine(max_image_bytes=1000), max_message_bytes=5000) as rig:
        picture = await post(rig, "caption", form((FILE, bytes(1001))))
        alone = await rig.ask("/v1/caption", bytes(1001), headers={"Content-Type": "image/png"})
        large = await post(rig, "caption", form((FILE, bytes(5000))))
        async with rig.connect() as connection:
            head = {"Content-Type": "multipart/form-data; boundary=b", "Transfer-Encoding": "chunked"}
            await connection.send("/v1/caption", verb="POST", headers=head)
            connection.writer.write(b"1389\r\n" + bytes(5001) + b"\r\n")
            endless = await connection.response()
    assert (picture.status, picture.json["error"]["code"]) == (413, "IMAGE_TOO_LARGE")
    assert picture.json["error"]["violations"][0]["field"] == "image"
    assert (alone.status, alone.json["error"]["code"]) == (413, "IMAGE_TOO_LARGE")
    assert (large.status, large.json["error"]["code"]) == (413, "MESSAGE_TOO_LARGE")
    assert (endless.status, endless.json["error"]["code"]) == (413, "MESSAGE_TOO_LARGE")


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_pages_of_other_sites_cannot_send_forms(tmp_path: Path, has_tokens: bool):
    site = "https://app.example"
    options: dict[str, Any] = {"tokens": tokens_in(tmp_path, alice='scopes = ["infer"]')} if has_tokens else {}
    known = bearer("alice") if has_tokens else {}
    async with serving_http(http_origins=(site,), **options) as rig:
        bodies = (("multipart/form-data; boundary=Bird-7", form((FILE, b"x"))), ("image/png", b"x"))
        own = f"http://localhost:{rig.server.http_port}"
        refused = [{"Sec-Fetch-Site": name} for name in ("cross-site", "same-site", "", "SAME-ORIGIN, cross-site")]
        refused += [{"Origin": "https://evil.example"}, {"Origin": "null", "Sec-Fetch-Site": "same-origin"}]
        allowed = [{}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Origin": site}]
        allowed.append({"Host": own[7:], "Origin": own, "Sec-Fetch-Site": "same-origin"})
        for media_type, body in bodies:
            given = {"Content-Type": media_type, **known}
            for headers in refused:
                answer = await rig.ask("/v1/caption", body, headers={**given, **headers})
                assert (answer.status, answer.json["error"]["code"]) == (403, "SOURCE_NOT_ALLOWED")
            assert rig.engine.requests == []
            for headers in allowed:
                assert (await rig.ask("/v1/caption", body, headers={**given, **headers})).status == 200
            rig.engine.requests.clear()


async def test_a_form_is_streamed_as_json_is(rig: HttpServing):
    answer = await post(rig, "caption", form((FILE, IMAGE_BYTES), text("stream", "true")))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.events[-1]["completed"] is True


async def test_the_openapi_document_has_the_forms(rig: HttpServing):
    document = (await rig.ask("/openapi.json")).json
    for route, fields, _ in SKILLS:
        content = document["paths"][f"/v1/{route}"]["post"]["requestBody"]["content"]
        assert content.keys() == {"application/json", "multipart/form-data", "image/*"}
        schema = content["multipart/form-data"]["schema"]
        assert schema["properties"].keys() > {"image", "settings", *fields}
        assert "image_url" not in schema["properties"]
        assert ("image" in schema["required"]) is (route != "query")
    assert json.dumps(document).count('"multipart/form-data"') == len(SKILLS)


async def test_points_in_forms_are_those_of_json(rig: HttpServing):
    assert (await post(rig, "gaze", form((FILE, b"x"), text("eye", "[0.5, 1]")))).status == 200
    (request,) = rig.engine.requests
    assert isinstance(request, Gaze)
    assert request.eye == PointRef(0.5, 1)
