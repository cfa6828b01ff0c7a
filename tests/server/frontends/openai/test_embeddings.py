"""`/v1/embeddings`: pictures in the forms of several clients, and vectors in both encodings."""

import base64
import struct
from typing import Any

import pytest

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.api.requests import Embed, Request, RequestOptions
from tests.fakes import FakeEngine, answers
from tests.over_sockets import BOTH_CHANNELS
from tests.server.http_calls import IMAGE_BYTES, IMAGE_URL, HttpServing, serving_http

pytestmark = [pytest.mark.asyncio(loop_scope="module"), BOTH_CHANNELS]

PATH = "/v1/embeddings"
VECTOR = [0.25, -0.5, 1.0]
SERVED = RequestOptions(model="fake")
PART = {"type": "image_url", "image_url": {"url": IMAGE_URL}}


def body(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": given, **fields}


@pytest.mark.parametrize(
    "given",
    [
        IMAGE_URL,
        [IMAGE_URL],
        base64.b64encode(IMAGE_BYTES).decode(),
        [{"image": IMAGE_URL}],
        {"image": {"url": IMAGE_URL}},
        [PART],
        [{"image_url": IMAGE_URL}],
        [{"type": "input_image", "image_url": IMAGE_URL}],
        [{"content": [PART]}],
    ],
)
async def test_a_picture_may_come_in_the_form_of_several_clients(rig: HttpServing, given: Any):
    answer = await rig.ask(PATH, body(given))
    assert rig.engine.requests == [Embed(IMAGE_BYTES, normalize=True, options=SERVED)]
    assert (answer.status, answer.json) == (
        200,
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": VECTOR}],
            "model": "fake",
            "usage": {"prompt_tokens": 729, "total_tokens": 729},
        },
    )


async def test_several_pictures_have_vectors_in_their_order_and_add_up(rig: HttpServing):
    fields = {
        "encoding_format": "base64",
        "normalize": False,
        "user": "me",
        "input_type": "image",
        "modality": "image",
    }
    answer = await rig.ask(PATH, body([IMAGE_URL, PART, IMAGE_URL], **fields))
    assert rig.engine.requests == [Embed(IMAGE_BYTES, options=SERVED)] * 3
    assert [item["index"] for item in answer.json["data"]] == [0, 1, 2]
    vectors = [struct.unpack("<3f", base64.b64decode(item["embedding"])) for item in answer.json["data"]]
    assert vectors == [tuple(VECTOR)] * 3
    assert answer.json["usage"] == {"prompt_tokens": 3 * 729, "total_tokens": 3 * 729}
    assert (await rig.ask(PATH, body([IMAGE_URL] * 2))).json["data"][1]["embedding"] == VECTOR


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input"),
        ("What a text!", "input"),
        ("cat", "input"),
        (["a text"], "input[0]"),
        ([IMAGE_URL, "a text"], "input[1]"),
        ([1, 2, 3], "input[0]"),
        ([], "input"),
        ([IMAGE_URL] * 17, "input"),
        ({"image": IMAGE_URL, "text": "a caption"}, "input"),
        ({"type": [], "image": IMAGE_URL}, "input"),
        ({"type": "image_url"}, "input"),
        ({"content": [PART, PART]}, "input"),
        ({"content": [{"content": [PART]}]}, "input"),
        (None, "input"),
    ],
)
async def test_what_is_no_picture_is_refused(rig: HttpServing, given: Any, param: str):
    answer = await rig.ask(PATH, body(given))
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert rig.engine.requests == []


async def test_each_item_that_is_no_picture_is_named(rig: HttpServing):
    answer = await rig.ask(PATH, body([1, IMAGE_URL, "a text", {"type": "text", "text": "words"}]))
    message = answer.json["error"]["message"]
    assert [place for place in range(4) if f"input[{place}]: must be a picture" in message] == [0, 2, 3]


@pytest.mark.parametrize("given", ["hi", "What is shown?", ["two", "texts"], [[1, 2], [3]]])
async def test_who_sends_texts_reads_that_texts_have_no_embeddings(rig: HttpServing, given: Any):
    answer = await rig.ask(PATH, body(given))
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
    assert "texts have no embeddings" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"dimensions": 8}, 400, "unsupported_parameter"),
        ({"encoding_format": "int8"}, 400, "invalid_request"),
        ({"hue": 1}, 400, "invalid_request"),
        ({"model": "gull"}, 404, "model_not_found"),
        ({"model": "colours"}, 400, "invalid_request"),
    ],
)
async def test_other_fields_are_those_of_the_table(
    rig: HttpServing, fields: dict[str, Any], status: int, code: str
):
    answer = await rig.ask(PATH, {**body(IMAGE_URL), **fields})
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert rig.engine.requests == []


async def test_a_picture_that_cannot_be_used_fails_the_call_and_names_its_place():
    bad = base64.b64encode(b"not a picture").decode()

    def script(request: Request) -> list[object]:
        broken = ImageError("cannot be decoded")
        return [broken] if request.images == (b"not a picture",) else list(answers(request))

    async with serving_http(FakeEngine(script)) as rig:
        answer = await rig.ask(PATH, body([IMAGE_URL, bad, IMAGE_URL]))
        await rig.engine.is_idle.wait()
    assert (answer.status, answer.json["error"]["param"]) == (400, "input[1]")
