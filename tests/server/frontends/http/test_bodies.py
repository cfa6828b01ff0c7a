"""Bodies of requests: what is taken, and what callers are told about what is not, all of it at once."""

import random
from base64 import b64encode
from typing import Any

import pytest

from kestrel_grpc.calls.errors import MAX_VIOLATIONS
from kestrel_grpc.frontends.http.bodies import Problems, example, read
from kestrel_grpc.frontends.http.fields import PLACEHOLDER, read_image
from kestrel_grpc.frontends.http.json_body import LongText
from kestrel_grpc.frontends.openai.requests import ChatBody, CompletionBody
from kestrel_grpc.frontends.rest.requests import ROUTES, CaptionBody, QueryBody
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation
from tests.fuzzing.bodies import strange_value

INNER_NAMES = (
    "type",
    "role",
    "content",
    "text",
    "image_url",
    "url",
    "json_schema",
    "name",
    "schema",
    "stop",
    "n",
    "logit_bias",
    "choices",
    "choice",
    "json",
)
ASKED = {"question": "?"}
SAID = {"role": "user", "content": "?"}
CHAT = {"model": "fake", "messages": [SAID]}


def told(body_type: Any, document: dict[str, Any]) -> dict[str, str]:
    """What is wrong with a document, by place."""
    problems = Problems()
    read(body_type, document, problems)
    try:
        problems.require_none()
    except InvalidRequest as error:
        return {item.field: item.description for item in error.violations}
    return {}


@pytest.mark.parametrize(
    ("given", "place", "description"),
    [
        ({"question": 1}, "question", "must be a text"),
        ({"question": "\ud800"}, "question", "holds half of a surrogate pair"),
        ({"question": LongText(b"a" * 70_000)}, "question", "must be at most 65536 bytes long"),
        ({"question": "a" * 70_000}, "question", "must be at most 65536 bytes long"),
        ({"question": None}, "question", "is required"),
        ({"stream": 1}, "stream", "must be true or false"),
        ({"stream": "true"}, "stream", "must be true or false"),
        ({"image_url": 5}, "image_url", "must be a text with an image"),
        ({"settings": []}, "settings", "must be an object"),
        ({"settings": {"max_tokens": "5"}}, "settings.max_tokens", "must be a whole number"),
        ({"settings": {"max_tokens": 5.0}}, "settings.max_tokens", "must be a whole number"),
        ({"settings": {"max_tokens": True}}, "settings.max_tokens", "must be a whole number"),
        ({"settings": {"top_p": True}}, "settings.top_p", "must be a number"),
        ({"settings": {"top_p": "0.5"}}, "settings.top_p", "must be a number"),
        ({"settings": {"top_p": 10**400}}, "settings.top_p", "must be a number"),
        ({"settings": {"stop": 5}}, "settings.stop", "must be a text or a list"),
        ({"settings": {"stop": ["a", None]}}, "settings.stop[1]", "must be a text"),
        ({"settings": {"stop": LongText(b"a")}}, "settings.stop", "must be at most 65536 bytes long"),
        ({"settings": {"stop": ["a"] * 17}}, "settings.stop", "must have at most 16 items"),
        ({"settings": {"logit_bias": []}}, "settings.logit_bias", "must be an object"),
        ({"settings": {"logit_bias": {"x": 1}}}, "settings.logit_bias[x]", "is not the id of a token"),
        ({"settings": {"logit_bias": {"-1": 1}}}, "settings.logit_bias[-1]", "is not the id of a token"),
        ({"settings": {"logit_bias": {"²": 1}}}, "settings.logit_bias[²]", "is not the id of a token"),
        ({"settings": {"logit_bias": {"٣": 1}}}, "settings.logit_bias[٣]", "is not the id of a token"),
        (
            {"settings": {"logit_bias": {"12345678901": 1}}},
            "settings.logit_bias[1234567890]",
            "is not the id of a token",
        ),
        ({"settings": {"logit_bias": {"7": True}}}, "settings.logit_bias[7]", "must be a number"),
        ({"priority": "soon"}, "priority", "must be one of interactive, normal, batch"),
        ({"priority": ["batch"]}, "priority", "must be one of interactive, normal, batch"),
        ({"spatial_refs": {}}, "spatial_refs", "must be a list"),
        ({"spatial_refs": [[0, 1], [0, "1"]]}, "spatial_refs[1]", "must be a list of two or four numbers"),
        ({"spatial_refs": [[0, 0, 0]]}, "spatial_refs[0]", "must be a list of two or four numbers"),
        ({"spatial_refs": [[0, 0]] * 257}, "spatial_refs", "must have at most 256 items"),
        ({"constraint": {"choices": ["a"] * 5000}}, "constraint.choices", "must have at most 256 items"),
        ({"constraint": {"json_schema": "{}"}}, "constraint.json_schema", "must be an object"),
        ({"questoin": "?"}, "questoin", "is not a field of this request; did you mean question?"),
        ({"x" * 100: 1}, "x" * 64, "is not a field of this request"),
        ({"settings": {"top_pp": 1}}, "settings.top_pp", "is not a field of this request; did you mean top_p?"),
        ({"settings": {"zzz": None, "n": None}}, "", ""),
    ],
)
def test_values_are_not_converted_and_each_wrong_one_is_named(given: Any, place: str, description: str):
    assert told(QueryBody, {**ASKED, **given}) == ({place: description} if place else {})


@pytest.mark.parametrize(
    ("body_type", "given", "place", "description"),
    [
        (CaptionBody, {"image_url": "", "constraint": {}}, "constraint", "is not a field of this request"),
        (ChatBody, {**CHAT, "echo": False}, "echo", "is not a field of this request"),
        (ChatBody, {**CHAT, "tools": [1]}, "tools[0]", "must be an object"),
        (ChatBody, {**CHAT, "tools": {}}, "tools", "must be a list"),
        (CompletionBody, {"model": "", "prompt": "?", "echo": 0}, "echo", "is not supported"),
        (CompletionBody, {"model": "", "prompt": "?", "best_of": True}, "best_of", "is not supported"),
        (ChatBody, {**CHAT, "messages": {}}, "messages", "must be a list"),
        (
            ChatBody,
            {**CHAT, "messages": [{**SAID, "nam": ""}]},
            "messages[0].nam",
            "is not a field of this request; did you mean name?",
        ),
        (
            ChatBody,
            {**CHAT, "messages": [SAID, {**SAID, "content": [{"type": "text", "txt": "?"}]}]},
            "messages[1].content[0].txt",
            "is not a field of this request; did you mean text?",
        ),
        (
            ChatBody,
            {**CHAT, "messages": [{**SAID, "content": [{"type": "video"}]}]},
            "messages[0].content[0].type",
            "must be one of text, image_url, refusal",
        ),
        (
            ChatBody,
            {**CHAT, "messages": [{**SAID, "content": [{"type": "text", "text": "?"}] * 257}]},
            "messages[0].content",
            "must have at most 256 items",
        ),
        (
            ChatBody,
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": 1}}},
            "response_format.json_schema.name",
            "must be a text",
        ),
    ],
)
def test_places_are_those_of_the_document(body_type: Any, given: dict[str, Any], place: str, description: str):
    assert told(body_type, given) == {place: description}


def test_a_value_that_was_not_readable_is_reported_once():
    problems = Problems()
    problems.add_unreadable([Violation("a.b[1]", "must be a text")], ["a.b[1]"])
    for field in ("a", "a.b", "a.b[1]", "a.b[1].c", "a.b[0]", "a.c", "ab"):
        problems.add(field, "is out of range")
    with pytest.raises(InvalidRequest) as refused:
        problems.require_none()
    assert [item.field for item in refused.value.violations] == ["a.b[1]", "a.b[0]", "a.c", "ab"]


def image_error(value: str, max_bytes: int = 100) -> ImageError:
    """The refusal of an image."""
    problems = Problems()
    assert read_image(value, "image", max_bytes, problems) == (PLACEHOLDER, None)
    with pytest.raises(ImageError) as refused:
        problems.require_none()
    return refused.value


def test_an_address_with_half_of_a_surrogate_pair_is_no_address():
    assert image_error("https://example.com/\ud800").violations[0].description == "is neither base64 nor a data URL"


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_an_image_that_is_too_large_is_refused_before_it_is_decoded(head: str):
    largest = b64encode(bytes(100)).decode()
    assert read_image(head + largest, "image", 100, Problems()).data == bytes(100)
    for too_large in (b64encode(bytes(101)).decode(), "!" * 140):
        error = image_error(head + too_large)
        assert (error.too_large, error.violations[0].description) == (True, "is larger than 100 bytes")
    assert image_error(head + "!" * 4).violations[0].description == "is not base64"


def test_a_search_for_what_was_meant_ends_with_what_callers_are_told():
    found = told(QueryBody, {**ASKED, **{f"questio{number}": 1 for number in range(2000)}})
    assert len(found) == 2000
    assert [name for name, text in found.items() if "did you mean" in text] == list(found)[:MAX_VIOLATIONS]


def test_a_schema_that_is_nested_too_deeply_is_refused_for_its_depth():
    schema: Any = {}
    for _ in range(5000):
        schema = {"items": schema}
    problems = Problems()
    constraint = read(QueryBody, {**ASKED, "constraint": {"json_schema": schema}}, problems).constraint
    assert constraint is not None
    (violation,) = constraint.value().violations()
    assert "levels deep" in violation.description


def test_ids_of_tokens_are_numbers_whatever_their_zeros():
    sampling = read(QueryBody, {**ASKED, "settings": {"logit_bias": {"17": -1, "004": 2}}}, Problems()).settings
    assert sampling.params().logit_bias == ((4, 2), (17, -1))


def strange_document(body_type: Any, draw: random.Random) -> dict[str, Any]:
    """A valid document in which some values are anything."""
    document = dict(example(body_type))
    names = [field.alias or name for name, field in body_type.model_fields.items()]
    for name in draw.sample(names, draw.randrange(1, 5)):
        nested = {inner: strange_value(draw) for inner in draw.sample(INNER_NAMES, draw.randrange(1, 4))}
        document[name] = draw.choice((strange_value(draw), nested, [strange_value(draw), nested]))
    return document


@pytest.mark.parametrize("body_type", [*ROUTES.values(), ChatBody, CompletionBody])
def test_whatever_a_document_holds_is_taken_or_refused_in_our_words(body_type: Any):
    draw = random.Random(1)
    num_refused = 0
    for _ in range(1000):
        document = strange_document(body_type, draw)
        before = repr(document)
        found = told(body_type, document)
        num_refused += bool(found)
        assert "is not valid" not in found.values(), document
        assert repr(document) == before
    assert num_refused > 500
