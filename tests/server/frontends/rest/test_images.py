"""`/v1/images`: files that are stored, described and deleted, and requests that name them."""

import hashlib
from pathlib import Path

import pytest

from kestrel_runtime.api.engine import EngineStatus
from tests.fakes import FakeEngine
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
    assert request.images == (FILE,)


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
    async with serving_http(FakeEngine(max_image_bytes=1000)) as rig:
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


@pytest.mark.parametrize("route", ["/v1/chat", "/v1/chat/completions", "/v1/responses"])
async def test_of_several_images_the_one_that_is_not_stored_is_named(route: str):
    async with serving_http() as rig:
        names = [(await put(rig)).json["image_id"], f"sha256:{'0' * 64}"]
        body = {
            "/v1/chat": {"messages": [{"role": "user", "content": "Which?", "image_urls": names}]},
            "/v1/chat/completions": {
                "model": rig.engine.info.model,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            *({"type": "image_url", "image_url": {"url": name}} for name in names),
                            {"type": "text", "text": "Which?"},
                        ],
                    }
                ],
            },
            "/v1/responses": {
                "model": rig.engine.info.model,
                "input": [
                    {
                        "role": "user",
                        "content": [
                            *({"type": "input_image", "image_url": name} for name in names),
                            {"type": "input_text", "text": "Which?"},
                        ],
                    }
                ],
            },
        }[route]
        answer = await rig.ask(route, body)
    assert (answer.status, answer.json["error"]["code"].upper()) == (404, "IMAGE_NOT_FOUND")
    assert names[1] in answer.json["error"]["message"]
    assert names[0] not in answer.json["error"]["message"]


@pytest.mark.one_process("the test tells the engine, not the server's side of it")
async def test_a_server_that_drains_stores_nothing():
    async with serving_http() as rig:
        rig.engine.become(EngineStatus.DRAINING)
        answer = await put(rig)
    assert (answer.status, answer.json["error"]["code"]) == (503, "DRAINING")


async def test_a_stored_image_is_described_and_deleted():
    async with serving_http() as rig:
        stored = await put(rig)
        found = await rig.ask(f"/v1/images/sha256:{DIGEST}")
        escaped = await rig.ask(f"/v1/images/sha256%3A{DIGEST}")
        deleted = await rig.ask(f"/v1/images/sha256:{DIGEST}", verb="DELETE")
        gone = await rig.ask(f"/v1/images/sha256:{DIGEST}")
        again = await rig.ask(f"/v1/images/sha256:{DIGEST}", verb="DELETE")
    assert (found.status, escaped.status, deleted.status) == (200, 200, 200)
    varying = {"request_id", "expires_at"}
    assert {name: value for name, value in found.json.items() if name not in varying} == {
        "image_id": f"sha256:{DIGEST}",
        "size_bytes": len(FILE),
        "media_type": "image/png",
        "width_px": 4,
        "height_px": 3,
        "pinned": False,
    }
    assert found.json.keys() == stored.json.keys()
    assert (deleted.json["image_id"], deleted.json["deleted"]) == (f"sha256:{DIGEST}", True)
    for answer in (gone, again):
        assert (answer.status, answer.json["error"]["code"]) == (404, "IMAGE_NOT_FOUND")
    # The caches may have an image that the store does not have.
    assert rig.engine.cleared == [("", bytes.fromhex(DIGEST))] * 2


@pytest.mark.parametrize("verb", ["GET", "DELETE"])
async def test_what_is_no_image_id_is_refused(verb: str):
    async with serving_http() as rig:
        answer = await rig.ask(f"/v1/images/{DIGEST}", verb=verb)
    assert (answer.status, answer.json["error"]["code"]) == (400, "INVALID_REQUEST")
    assert answer.json["error"]["violations"][0]["field"] == "image_id"
    assert rig.engine.cleared == []


async def test_other_verbs_are_not_allowed():
    async with serving_http() as rig:
        answer = await rig.ask(f"/v1/images/sha256:{DIGEST}", {}, verb="POST")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, DELETE, HEAD")


async def test_images_belong_to_a_namespace_and_need_a_token_for_images(tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    scopes = {"alice": "images", "bob": "images", "carol": "infer"}
    tokens.write_text(
        "".join(
            f'{name} = {{ sha256 = "{hashlib.sha256(name.encode()).hexdigest()}", scopes = ["{scope}"] }}\n'
            for name, scope in scopes.items()
        )
    )
    path = f"/v1/images/sha256:{DIGEST}"
    async with serving_http(tokens=str(tokens)) as rig:
        bearer = {name: {"Authorization": f"Bearer {name}"} for name in scopes}
        put_headers = {"Content-Type": "image/png", **bearer["alice"]}
        assert (await rig.ask("/v1/images", FILE, verb="PUT", headers=put_headers)).status == 200
        for verb in ("GET", "DELETE"):
            unknown = await rig.ask(path, verb=verb)
            other = await rig.ask(path, verb=verb, headers=bearer["bob"])
            infer = await rig.ask(path, verb=verb, headers=bearer["carol"])
            assert (unknown.status, unknown.json["error"]["code"]) == (401, "TOKEN_INVALID")
            assert (other.status, other.json["error"]["code"]) == (404, "IMAGE_NOT_FOUND")
            assert (infer.status, infer.json["error"]["code"]) == (403, "SCOPE_REQUIRED")
        assert (await rig.ask(path, headers=bearer["alice"])).status == 200
        assert (await rig.ask(path, verb="DELETE", headers=bearer["alice"])).status == 200


async def test_calls_are_counted_by_their_name():
    async with serving_http() as rig:
        await put(rig)
        await rig.ask(f"/v1/images/sha256:{DIGEST}")
        await rig.ask(f"/v1/images/sha256:{DIGEST}", verb="DELETE")
        metrics = (await rig.ask("/metrics")).body.decode()
    for method in ("rest/images", "rest/images.get", "rest/images.delete"):
        labels = f'{{rpc_method="{method}",rpc_response_status_code="OK"}}'
        assert f"rpc_server_call_duration_seconds_count{labels} 1" in metrics


async def test_where_nothing_is_stored_there_is_no_such_route():
    async with serving_http(max_stored_image_bytes=0) as rig:
        assert (await put(rig)).status == 404
        assert (await rig.ask(f"/v1/images/sha256:{DIGEST}")).status == 404
        assert "/v1/images" not in (await rig.ask("/openapi.json")).json["paths"]
