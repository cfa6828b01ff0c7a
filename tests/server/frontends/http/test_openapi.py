"""The OpenAPI document describes every operation, with the fields that its parser reads."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kestrel_grpc.frontends.http.bodies import Body, example
from kestrel_grpc.frontends.openai.embeddings import EmbeddingBody
from kestrel_grpc.frontends.openai.requests import ChatBody, CompletionBody
from kestrel_grpc.frontends.openai.responses import ResponseBody
from kestrel_grpc.frontends.rest.requests import ROUTES
from kestrel_runtime.api.sampling_params import RANGES
from tests.server.http_calls import HttpServing

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODIES = {
    **{f"/v1/{skill}": body for skill, body in ROUTES.items()},
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/embeddings": EmbeddingBody,
}


async def test_the_document_has_every_route_of_both_apis(rig: HttpServing):
    document = (await rig.ask("/openapi.json")).json
    paths: dict[str, Any] = document["paths"]
    images, models = ("/v1/images", "/v1/images/{image_id}"), ("/v1/models", "/v1/models/{model}")
    assert paths.keys() == {*BODIES, *images, *models, "/v1/server"}
    assert paths["/v1/images/{image_id}"].keys() == {"get", "delete"}
    assert [item["name"] for item in paths["/v1/images"]["put"]["parameters"]] == ["sha256", "ttl_seconds", "pin"]
    assert [item["name"] for item in paths["/v1/models/{model}"]["get"]["parameters"]] == ["model"]
    schemas = document["components"]["schemas"]
    assert all("properties" in schema for schema in schemas.values())
    for path in BODIES:
        operation = paths[path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[reference.removeprefix("#/components/schemas/")]
        streams = "stream" in schema["properties"]
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) is streams
        assert schema["additionalProperties"] is False
        validator = Draft202012Validator({**schema, "components": document["components"]})
        validator.check_schema(schema)
        assert validator.is_valid(example(BODIES[path]))
        assert not validator.is_valid({**example(BODIES[path]), "colour": "red"})
        assert not validator.is_valid({})
    settings = schemas["Settings"]["properties"]
    for name, (least, most) in RANGES.items():
        assert (settings[name]["minimum"], settings[name]["maximum"]) == (least, most)
    identifiers = [item["operationId"] for path in paths.values() for item in path.values()]
    assert len(set(identifiers)) == len(identifiers)


@pytest.mark.parametrize("path", BODIES)
async def test_the_examples_of_required_fields_make_a_request(rig: HttpServing, path: str):
    body: type[Body] = BODIES[path]
    # An object is required where there are no objects.
    either = {"object": "bird"} if "objects" in body.model_fields else {}
    given = {**example(body), **either, "model": "fake"}
    assert example(body).keys() == {name for name, field in body.model_fields.items() if field.is_required()}
    assert (await rig.ask(path, given)).status == 200
