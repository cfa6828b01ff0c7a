import dataclasses

import pytest
from msgspec import structs

from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import (
    CAPTION_LENGTHS,
    MAX_CHAT_IMAGES,
    MAX_CHAT_MESSAGES,
    MAX_OBJECT_NAMES,
    MAX_OBJECTS,
    MAX_SPATIAL_REFS,
    MAX_TEXT_BYTES,
    BoxRef,
    Caption,
    Chat,
    ChatMessage,
    Detect,
    Gaze,
    Point,
    PointRef,
    Query,
    RequestOptions,
    Role,
    SamplingParams,
    Segment,
    image_paths,
    parts_of,
)
from kestrel_runtime.api.sampling_params import MAX_OUTPUT_TOKENS, MAX_SEED, MAX_STOP_CHARS, MAX_STOPS

IMAGE = b"any bytes"
NAN, INFINITY = float("nan"), float("inf")

MINIMAL = {
    "query": lambda **fields: Query("what?", **fields),
    "caption": lambda **fields: Caption(IMAGE, **fields),
    "point": lambda **fields: Point("cat", IMAGE, **fields),
    "detect": lambda **fields: Detect("cat", IMAGE, **fields),
    "segment": lambda **fields: Segment("cat", IMAGE, **fields),
    "gaze": lambda **fields: Gaze(IMAGE, PointRef(0.5, 0.5), **fields),
    "chat": lambda **fields: Chat((ChatMessage(Role.USER, "what?"),), **fields),
}


def breaches(build, *args, **fields):
    """The fields that a constructor complains of, in its order."""
    with pytest.raises(InvalidRequest) as caught:
        build(*args, **fields)
    return [violation.field for violation in caught.value.violations]


def test_every_breach_is_told_at_once_in_field_order():
    fields = breaches(
        Point,
        " ",
        b"",
        max_objects=0,
        spatial_refs=(PointRef(2, -1), BoxRef(0.9, 0.8, 0.1, 0.2)),
        sampling=SamplingParams(temperature=-1, top_p=0, max_tokens=0, seed=-1),
        options=RequestOptions(max_queue_s=0),
    )
    assert fields == [
        "object",
        "image",
        "max_objects",
        "spatial_refs[0].point.x",
        "spatial_refs[0].point.y",
        "spatial_refs[1].box.x_max",
        "spatial_refs[1].box.y_max",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "sampling.seed",
        "options.max_queue_duration",
    ]


def test_the_message_tells_every_breach():
    with pytest.raises(InvalidRequest, match=r"question: must not be empty; sampling.seed: must not"):
        Query("", sampling=SamplingParams(seed=-1))


@pytest.mark.parametrize("skill", MINIMAL)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.001),
        ("temperature", 100.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("temperature", -INFINITY),
        ("top_p", 0.0),
        ("top_p", 1.001),
        ("top_p", -0.5),
        ("top_p", NAN),
        ("top_p", INFINITY),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", MAX_OUTPUT_TOKENS + 1),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
    ],
)
def test_sampling_out_of_bounds_is_refused_for_every_skill(skill, field, value):
    assert breaches(MINIMAL[skill], sampling=SamplingParams(**{field: value})) == [f"sampling.{field}"]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(0.0, 1.0, 1, 0),
        SamplingParams(100.0, 1e-9, MAX_OUTPUT_TOKENS, MAX_SEED),
        SamplingParams(stop=("a" * MAX_STOP_CHARS,) * MAX_STOPS, include_stop=True),
        SamplingParams(top_k=1, min_p=0.0, repetition_penalty=0.1, presence_penalty=-2.0, logprobs=0),
        SamplingParams(min_p=1.0, repetition_penalty=10.0, frequency_penalty=2.0, logprobs=20),
        SamplingParams(logit_bias=tuple((id, 100.0) for id in range(300))),
        SamplingParams(n=16, logprobs=20),
        SamplingParams(n=16, logprobs=20, max_tokens=768),
        SamplingParams(n=16, logprobs=15, max_tokens=1024),
        SamplingParams(logprobs=20, max_tokens=12_483),
        SamplingParams(n=16, max_tokens=MAX_OUTPUT_TOKENS),
    ],
)
def test_sampling_at_its_bounds_is_taken(sampling):
    assert Query("what?", sampling=sampling).sampling == sampling


@pytest.mark.parametrize("skill", ["query", "caption"])
@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        (SamplingParams(stop=("a",) * (MAX_STOPS + 1)), ["stop"]),
        (SamplingParams(stop=("a", "", "a" * (MAX_STOP_CHARS + 1))), ["stop[1]", "stop[2]"]),
        (SamplingParams(top_k=0, min_p=1.1), ["top_k", "min_p"]),
        (SamplingParams(n=16, logprobs=20, max_tokens=781), ["logprobs"]),
        (SamplingParams(n=16, logprobs=15, max_tokens=1025), ["logprobs"]),
        (SamplingParams(logprobs=20, max_tokens=12_484), ["logprobs"]),
        (SamplingParams(n=9, logprobs=0, max_tokens=MAX_OUTPUT_TOKENS), ["logprobs"]),
        (
            SamplingParams(min_p=NAN, repetition_penalty=0.0, presence_penalty=2.1, frequency_penalty=-2.1),
            ["min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
        ),
        (SamplingParams(repetition_penalty=INFINITY), ["repetition_penalty"]),
        (SamplingParams(logit_bias=((3, 100.5), (4, 1.0), (5, NAN))), ["logit_bias[3]", "logit_bias[5]"]),
        (SamplingParams(logit_bias=tuple((id, 1.0) for id in range(301))), ["logit_bias"]),
        (SamplingParams(logit_bias=((3, 1.0), (3, 2.0))), ["logit_bias"]),
        (SamplingParams(logprobs=21), ["logprobs"]),
        (SamplingParams(top_k=10**400), ["top_k"]),
        (SamplingParams(n=0), ["n"]),
        (SamplingParams(n=17), ["n"]),
        (SamplingParams(logprobs=-1), ["logprobs"]),
    ],
)
def test_sampling_of_text_out_of_bounds_is_refused(skill, sampling, fields):
    assert breaches(MINIMAL[skill], sampling=sampling) == [f"sampling.{field}" for field in fields]


@pytest.mark.parametrize("skill", ["point", "detect", "segment", "gaze"])
def test_settings_of_text_are_refused_by_name_where_there_is_none(skill):
    given = {
        "stop": ("a",),
        "include_stop": True,
        "top_k": 1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "n": 1,
        "logit_bias": ((1, 1.0),),
    }
    assert breaches(MINIMAL[skill], sampling=SamplingParams(**given)) == [f"sampling.{name}" for name in given]
    assert len(given) == len(dataclasses.fields(SamplingParams)) - 4  # which all skills have


@pytest.mark.parametrize("skill", MINIMAL)
@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INFINITY])
def test_a_queue_time_must_be_positive_and_finite(skill, value):
    assert breaches(MINIMAL[skill], options=RequestOptions(max_queue_s=value)) == ["options.max_queue_duration"]


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_a_text_must_have_something_in_it(text):
    assert breaches(Query, text) == ["question"]
    assert breaches(Point, text, IMAGE) == ["object"]
    assert breaches(Detect, text, IMAGE) == ["object"]
    assert breaches(Segment, text, IMAGE) == ["object"]


def test_an_image_of_no_bytes_is_refused():
    assert breaches(Query, "what?", b"") == ["image"]
    assert breaches(Caption, b"") == ["image"]
    for kind in (Point, Detect, Segment):
        assert breaches(kind, "cat", b"") == ["image"]


def test_a_query_may_go_without_an_image_but_not_with_references_then():
    assert Query("what?").image is None
    assert breaches(Query, "what?", spatial_refs=(PointRef(0.5, 0.5),)) == ["spatial_refs"]
    assert Query("what?", IMAGE, spatial_refs=(PointRef(0.5, 0.5),)).spatial_refs


@pytest.mark.parametrize("length", CAPTION_LENGTHS)
def test_a_caption_has_one_of_three_lengths(length):
    assert Caption(IMAGE, length).length == length


@pytest.mark.parametrize("length", ["", "Short", "medium"])
def test_a_caption_of_any_other_length_is_refused(length):
    assert breaches(Caption, IMAGE, length) == ["length"]


@pytest.mark.parametrize("kind", [Point, Detect])
def test_objects_are_bounded(kind):
    assert breaches(kind, "cat", IMAGE, 0) == ["max_objects"]
    assert breaches(kind, "cat", IMAGE, MAX_OBJECTS + 1) == ["max_objects"]
    assert kind("cat", IMAGE, 1).max_objects == 1
    assert kind("cat", IMAGE, MAX_OBJECTS).max_objects == MAX_OBJECTS


@pytest.mark.parametrize("value", [-0.001, 1.001, NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("side", ["x", "y"])
def test_a_point_outside_the_image_is_refused(side, value):
    ref = structs.replace(PointRef(0.5, 0.5), **{side: value})
    assert breaches(Query, "what?", IMAGE, spatial_refs=(PointRef(0, 1), ref)) == [f"spatial_refs[1].point.{side}"]


@pytest.mark.parametrize("value", [-0.001, 1.001, NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("side", ["x_min", "y_min", "x_max", "y_max"])
def test_a_box_outside_the_image_is_refused(side, value):
    ref = structs.replace(BoxRef(0.2, 0.2, 0.8, 0.8), **{side: value})
    assert f"spatial_refs[0].box.{side}" in breaches(Segment, "cat", IMAGE, spatial_refs=(ref,))


def test_a_box_must_not_be_inside_out():
    assert breaches(Query, "what?", IMAGE, spatial_refs=(BoxRef(0.6, 0, 0.5, 1),)) == ["spatial_refs[0].box.x_max"]
    assert breaches(Query, "what?", IMAGE, spatial_refs=(BoxRef(0, 0.6, 1, 0.5),)) == ["spatial_refs[0].box.y_max"]


@pytest.mark.parametrize("ref", [PointRef(0, 0), PointRef(1, 1), BoxRef(0, 0, 1, 1), BoxRef(0.5, 0.5, 0.5, 0.5)])
def test_references_may_touch_the_rim_and_be_empty(ref):
    assert Query("what?", IMAGE, spatial_refs=(ref,)).spatial_refs == (ref,)


@pytest.mark.parametrize("character", ["a", "\u00e9", "\U0001f985"])
def test_a_text_is_bounded_in_bytes(character):
    text = character * (MAX_TEXT_BYTES // len(character.encode()))
    Query(text)
    assert breaches(Query, text + character) == ["question"]
    assert breaches(Point, text + character, IMAGE) == ["object"]


def test_a_text_of_many_megabytes_is_refused_with_every_other_breach():
    fields = breaches(Query, "word " * 10**6, b"", sampling=SamplingParams(temperature=-1.0))
    assert fields == ["question", "image", "sampling.temperature"]


def test_too_many_spatial_references_are_one_breach_whatever_they_are():
    wrong = PointRef(2.0, 2.0)
    assert len(breaches(Query, "?", IMAGE, spatial_refs=(wrong,) * MAX_SPATIAL_REFS)) == 2 * MAX_SPATIAL_REFS
    assert breaches(Query, "?", IMAGE, spatial_refs=(wrong,) * (MAX_SPATIAL_REFS + 1)) == ["spatial_refs"]


def test_samples_have_seeds_of_their_own_that_follow_from_the_first():
    sampling = SamplingParams(temperature=0.5, seed=7, n=4)
    samples = sampling.samples()
    assert samples == sampling.samples()
    seeds = [sample.seed for sample in samples]
    assert seeds[0] == 7
    assert len({*seeds, *(sample.seed for sample in dataclasses.replace(sampling, seed=8).samples())}) == 8
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in seeds)
    assert all(dataclasses.replace(sample, seed=7, n=4) == sampling for sample in samples)
    assert [sample.seed for sample in SamplingParams(n=2).samples()] == [None, None]
    alone = SamplingParams(seed=3)
    assert alone.samples() == (alone,)


SYSTEM, USER, ASSISTANT = Role


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], ["messages"]),
        ([(USER, "a")] * (MAX_CHAT_MESSAGES + 1), ["messages"]),
        ([(USER, "a"), (SYSTEM, "b"), (ASSISTANT, "c")], ["messages[1].role", "messages[2].role"]),
        ([(SYSTEM, "a")], ["messages[0].role"]),
        ([(USER, "a"), (USER, " ")], ["messages[1].content"]),
        ([(USER, "a" * MAX_TEXT_BYTES), (USER, "a")], ["messages"]),
        ([(USER, "a", (IMAGE,) * 9), (USER, "a", (IMAGE,) * 8)], ["messages"]),
        ([(SYSTEM, "a", (IMAGE,)), (USER, "a", (b"",))], ["messages[0].images", "messages[1].images[0]"]),
        (
            [(ASSISTANT, "a", (IMAGE,)), (USER, "a", (IMAGE, RawImage(b"", 0, 1, PixelFormat.RGB8, 0)))],
            ["messages[0].images", "messages[1].images[1].raw.width_px"],
        ),
    ],
)
def test_conversations_that_make_no_sense_are_refused(turns, expected):
    assert breaches(Chat, tuple(ChatMessage(*turn) for turn in turns)) == expected


def test_conversations_may_begin_with_any_role_and_repeat_one():
    turns = ((SYSTEM, "a"), (SYSTEM, ""), (ASSISTANT, ""), (ASSISTANT, "b"), (USER, ""), (USER, "c"))
    request = Chat(tuple(ChatMessage(*turn) for turn in turns))
    assert request.text.split() == ["a", "b", "c"]


def test_the_images_of_a_conversation_keep_their_turns():
    seen = ChatMessage(USER, "a", (b"1",)), ChatMessage(USER, "d", (b"2", b"3"))
    request = Chat((seen[0], ChatMessage(ASSISTANT, "b"), ChatMessage(USER, "c"), seen[1]))
    assert request.images == (b"1", b"2", b"3")
    assert request.turns == ((USER, "a", 1), (ASSISTANT, "b", 0), (USER, "c", 0), (USER, "d", 2))
    assert image_paths(request) == ["messages[0].images[0]", "messages[3].images[0]", "messages[3].images[1]"]
    other = request.with_images((b"x", b"y", b"z"))
    assert (other.images, other.turns) == ((b"x", b"y", b"z"), request.turns)
    sixteen = (ChatMessage(USER, "a", (IMAGE,) * 9), ChatMessage(USER, "a", (IMAGE,) * 7))
    assert len(Chat(sixteen).images) == MAX_CHAT_IMAGES


@pytest.mark.parametrize("kind", [Point, Detect])
@pytest.mark.parametrize(
    ("object", "objects", "expected"),
    [
        ("", (), ["object"]),
        ("a", ("b",), ["object"]),
        ("", ("a", "", " "), ["objects[1]", "objects[2]"]),
        ("", ("a",) * MAX_OBJECT_NAMES, []),
        ("", ("a",) * (MAX_OBJECT_NAMES + 1), ["objects"]),
        ("", ("a" * (MAX_TEXT_BYTES + 1), "a"), ["objects[0]"]),
    ],
)
def test_a_request_has_one_object_or_up_to_64(kind, object, objects, expected):
    if expected:
        assert breaches(kind, object, IMAGE, objects=objects) == expected
    else:
        kind(object, IMAGE, objects=objects)


def test_several_objects_are_requests_of_their_own_in_this_order():
    request = Detect("", IMAGE, max_objects=3, objects=("car", "person", "car"))
    assert parts_of(request) == [Detect(name, IMAGE, max_objects=3) for name in ("car", "person", "car")]
    assert request.objects == ("car", "person", "car")
    assert request.text == "car\nperson\ncar"
    alone = Point("car", IMAGE)
    assert (parts_of(alone), alone.objects, Query("car").objects) == ([alone], (), ())
    samples = Query("?", sampling=SamplingParams(seed=7, n=3))
    assert [part.sampling for part in parts_of(samples)] == list(samples.sampling.samples())
