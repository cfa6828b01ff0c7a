"""`PUT /v1/images`: files that are stored, and requests that name them."""

from __future__ import annotations

import hashlib

import pytest

from kestrel_runtime.api.engine import EngineStatus
from tests.server.http_calls import HttpServing, Response, serving_http

FILE = b"an encoded image"
DIGEST = hashlib.sha256(FILE).hexdigest()


async def put(rig: HttpServing, query: str = "", data: bytes = FILE, media_type: str = "image/png") -> Response:
    headers = {"Content-Type": media_type}
    return await rig.ask(f"/v1/images{query}", data, verb="PUT", headers=headers)


async def test_a_stored_image_is_named_by_other_requests():
    async with serving_http() as rig:
        stored = await put(rig, f"?sha256={DIGEST}&ttl_seconds=60&pin=true")
        answer = await rig.ask("/v1/caption", {"image_url": stored.json["image_id"]})
        (request,) = rig.engine.requests
    assert (stored.status, stored.json["image_id"]) == (200, f"sha256:{DIGEST}")
    assert (stored.json["size_bytes"], stored.json["pinned"]) == (len(FILE), True)
    assert answer.status == 200
    assert request.image == FILE


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("?sha256=abc", "sha256"),
        ("?ttl_seconds=soon", "ttl_seconds"),
        ("?ttl_seconds=-1", "ttl_seconds"),
        ("?ttl_seconds=inf", "ttl_seconds"),
        ("?pin=yes", "pin"),
        ("?colour=red", "colour"),
    ],
)
async def test_parameters_that_are_wrong_are_named(query: str, field: str):
    async with serving_http() as rig:
        answer = await put(rig, query)
    assert (answer.status, answer.json["error"]["violations"][0]["field"]) == (400, field)


async def test_files_that_are_not_what_they_should_be_are_refused():
    async with serving_http() as rig:
        other = await put(rig, f"?sha256={'0' * 64}")
        empty = await put(rig, data=b"")
        page = await put(rig, media_type="text/plain")
        large = await put(rig, data=bytes(rig.engine.info.config.max_image_bytes + 1))
    assert (other.status, other.json["error"]["code"]) == (400, "IMAGE_DIGEST_MISMATCH")
    assert empty.status == 400
    assert (page.status, page.json["error"]["code"]) == (415, "MEDIA_TYPE_UNSUPPORTED")
    assert (large.status, large.json["error"]["code"]) == (413, "IMAGE_TOO_LARGE")


async def test_an_image_that_is_not_stored_is_told_from_a_model_that_is_not_served():
    async with serving_http() as rig:
        answer = await rig.ask("/v1/caption", {"image_url": f"sha256:{DIGEST}"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "IMAGE_NOT_FOUND")


async def test_a_server_that_drains_stores_nothing():
    async with serving_http() as rig:
        rig.engine.become(EngineStatus.DRAINING)
        answer = await put(rig)
    assert (answer.status, answer.json["error"]["code"]) == (503, "DRAINING")


async def test_where_nothing_is_stored_there_is_no_such_route():
    async with serving_http(max_stored_image_bytes=0) as rig:
        assert (await put(rig)).status == 404
        assert "/v1/images" not in (await rig.ask("/openapi.json")).json["paths"]
