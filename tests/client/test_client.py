"""The blocking client, against a canned server."""

import hashlib
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2

from kestrel_client import (
    Adapter,
    Box,
    CallerUsage,
    Cancelled,
    ClearedCache,
    Client,
    DeadlineExceeded,
    DetectedObject,
    EngineInfo,
    EngineLoad,
    EngineStatus,
    FinishReason,
    FrontendLoad,
    InvalidRequest,
    Job,
    KestrelClientError,
    Load,
    Point,
    RequestRefused,
    Segment,
    TextChannel,
    Unavailable,
    UploadedAdapter,
)
from kestrel_client.errors import ServerError
from kestrel_client.sending import TextEvents
from kestrel_client.v1 import generation_pb2
from tests.client import canned
from tests.client.canned import CannedVision

PICTURE = b"picture"


def test_query_yields_the_answer_as_it_is_written_and_then_the_result(client: Client):
    stream = client.query(PICTURE, "what?")
    assert list(stream) == list(canned.ANSWER_PIECES)
    result = stream.result()
    assert result.answer == "A red kite – höher."
    assert result.reasoning is None
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.input_token_count == 740
    assert result.timing.decode_s == 1.5


def test_result_may_be_taken_without_reading_the_pieces(client: Client):
    assert client.query(PICTURE, "what?").result().answer == "A red kite – höher."


def test_result_may_be_taken_in_the_middle_of_the_pieces(client: Client):
    stream = client.query(PICTURE, "what?")
    for piece in stream:
        assert piece == canned.ANSWER_PIECES[0]
        break
    assert stream.result().answer == "A red kite – höher."


def test_pieces_are_of_the_answer_alone_and_deltas_of_every_channel(client: Client):
    assert "".join(client.query(PICTURE, "what?", reasoning=True)) == "A red kite – höher."
    stream = client.query(PICTURE, "what?", reasoning=True)
    deltas = list(stream.deltas())
    assert [delta.channel for delta in deltas] == [TextChannel.REASONING] + [TextChannel.ANSWER] * 3
    reasoning = stream.result().reasoning
    assert reasoning is not None
    assert deltas[0].text == reasoning.text == canned.THOUGHT
    assert reasoning.groundings[0].points == (Point(0.5, 0.25),)


def test_complete_query_equals_the_result_of_the_stream(client: Client):
    whole = client.complete_query(None, "what?", reasoning=True)
    assert whole == client.query(None, "what?", reasoning=True).result()


def test_caption_streams_and_completes_alike(client: Client, vision: CannedVision):
    stream = client.caption(PICTURE, length="short")
    assert list(stream) == list(canned.CAPTION_PIECES)
    assert stream.result() == client.complete_caption(PICTURE, length="short")
    assert [request.length for request in vision.requests] == [1, 1]


def test_places_come_back_as_plain_values(client: Client):
    box = Box(0.25, 0.125, 0.75, 0.5)
    assert client.point(PICTURE, "kite").points == (Point(0.25, 0.5), Point(0.75, 1.0))
    assert client.detect(PICTURE, "kite").objects == (DetectedObject(box),)
    assert client.segment(PICTURE, "kite").segments == (Segment(canned.SVG_PATH, box),)


def test_an_outline_grows_from_its_box_to_the_whole(client: Client):
    stream = client.stream_segment(PICTURE, "kite")
    segments = list(stream)
    assert [segment.svg_path for segment in segments] == ["", "M 0 0", "M 0 0 L 1 0", canned.SVG_PATH]
    assert {segment.box for segment in segments} == {Box(0.25, 0.125, 0.75, 0.5)}
    assert all(segment.is_partial for segment in segments)
    assert stream.result() == client.segment(PICTURE, "kite")


def test_an_outline_tells_whether_it_is_partial(client: Client):
    (segment,) = client.segment(PICTURE, "cloud").segments
    assert segment.is_partial
    assert client.stream_segment(PICTURE, "cloud").result().segments == (segment,)


def test_the_stream_of_an_outline_that_is_not_found_is_empty(client: Client):
    stream = client.stream_segment(PICTURE, "unicorn")
    assert list(stream) == []
    assert stream.result().segments == ()


def test_several_objects_have_a_group_each_and_an_error_of_one_is_an_exception(
    client: Client, vision: CannedVision
):
    found = client.detect(PICTURE, ["car", "unicorn"], max_objects=2)
    assert (found.object, found.objects) == ("", ())
    car, unicorn = found.groups
    assert (car.object, car.finish_reason, car.error) == ("car", FinishReason.STOP, None)
    assert car.objects[0].box.to_pixels(found.width_px or 0, found.height_px or 0) == (50, 12, 150, 50)
    assert isinstance(unicorn.error, RequestRefused)
    assert (unicorn.error.reason, unicorn.error.request_id, str(unicorn.error)) == ("REQUEST_REFUSED", "r-1", "no")
    points = client.point(PICTURE, ("car",)).groups
    assert [(group.object, group.points) for group in points] == [("car", (Point(0.25, 0.5), Point(0.75, 1.0)))]
    assert [list(request.objects) for request in vision.requests] == [["car", "unicorn"], ["car"]]
    assert {request.object for request in vision.requests} == {""}
    assert client.detect(PICTURE, "car").groups == ()


def test_what_is_found_comes_one_by_one_with_what_was_looked_for(client: Client):
    boxes = client.stream_detect(PICTURE, ["car", "unicorn", "dog"])
    assert [(name, found.box) for name, found in boxes] == [
        ("car", Box(0.25, 0.125, 0.75, 0.5)),
        ("dog", Box(0.25, 0.125, 0.75, 0.5)),
    ]
    whole = client.detect(PICTURE, ["car", "unicorn", "dog"])
    assert [group.objects for group in boxes.result().groups] == [group.objects for group in whole.groups]
    assert isinstance(boxes.result().groups[1].error, RequestRefused)
    with client.stream_point(PICTURE, "car") as points:
        assert [(name, found.point) for name, found in points] == [
            ("car", Point(0.25, 0.5)),
            ("car", Point(0.75, 1.0)),
        ]
    assert points.result() == client.point(PICTURE, "car")


@pytest.mark.parametrize("wanted", ["car", ["unicorn", "car"]])
def test_a_least_score_that_an_older_server_ignores_is_an_error(
    client: Client, vision: CannedVision, wanted: str | list[str]
):
    for ask in (
        lambda: client.detect(PICTURE, wanted, min_score=0.5),
        lambda: client.point(PICTURE, wanted, min_score=0.5),
        lambda: client.stream_detect(PICTURE, wanted, min_score=0.5).result(),
        lambda: next(client.stream_point(PICTURE, wanted, min_score=0.5)),
    ):
        with pytest.raises(ServerError, match="the server makes no scores") as caught:
            ask()
        assert caught.value.reason == "SCORES_MISSING"
        assert caught.value.request_id
    assert client.detect(PICTURE, ["unicorn"], min_score=0.5).groups[0].objects == (), "nothing is left out"
    vision.score = 0.75
    (found,) = client.detect(PICTURE, "car", min_score=0.5).objects
    assert found.score == 0.75


@pytest.mark.parametrize("object", [[], ["car", 3], 3, {"car": 1}, None])
def test_what_is_neither_a_text_nor_texts_is_refused_before_it_is_sent(
    client: Client, vision: CannedVision, object: Any
):
    for ask in (client.detect, client.point):
        with pytest.raises(InvalidRequest, match="object: is a text, or texts in a list"):
            ask(PICTURE, object)
    assert vision.requests == []


def test_an_embedding_has_its_mean_and_its_patches_where_they_are_asked_for(client: Client, vision: CannedVision):
    whole = client.embed(PICTURE, normalize=True, cache="bypass")
    assert (whole.mean, whole.patch_count, whole.patches) == ((0.5, -1.0, 0.25), 2, b"")
    assert vision.requests[-1].normalize
    assert vision.requests[-1].options.cache == generation_pb2.CACHE_POLICY_BYPASS
    half, exact = client.embed(PICTURE, patches=True), client.embed(PICTURE, patches=True, dtype="float32")
    assert (half.mean, half.patch_count) == ((1.0, -2.0, 0.5), 2)
    assert struct.unpack("<6e", half.patches) == struct.unpack("<6f", exact.patches) == (1.0, -2.0, 0.5) * 2
    job = Job("embed", PICTURE, patches=True)
    assert [outcome.result for outcome in client.map([job])] == [half]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.0}, "temperature: has no meaning for embeddings"),
        ({"adapter": "colours"}, "adapter: has no meaning for embeddings"),
        ({"dtype": "int8", "patches": True}, "dtype: is one of float16, float32, not 'int8'"),
        ({"normalize": "yes"}, "normalize: cannot be 'yes'"),
    ],
)
def test_an_embedding_takes_no_settings_of_texts(client: Client, given: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        client.embed(PICTURE, **given)


def test_a_gaze_has_a_target_or_none(client: Client, vision: CannedVision):
    assert client.gaze(PICTURE, Point(0.25, 0.125)).target == Point(0.25, 0.5)
    assert client.gaze(PICTURE, Point(0.75, 0.125)).target is None
    assert [(request.eye.x, request.eye.y) for request in vision.requests] == [(0.25, 0.125), (0.75, 0.125)]


def test_the_image_travels_with_every_skill_and_only_if_there_is_one(client: Client, vision: CannedVision):
    num_calls = canned.ask_with_every_call(client, PICTURE)
    assert [request.image.data for request in vision.requests] == [PICTURE] * num_calls
    client.complete_query(None, "q")
    assert not vision.requests[-1].HasField("image")


def test_the_server_tells_about_itself(client: Client):
    info = client.server_info()
    assert (info.server_version, info.instance_id, info.capabilities) == ("9.9", "abc", ("fly",))
    assert info.limits.max_running_requests == 5
    assert info.model == "tiny"
    (model,) = client.list_models()
    assert (model.name, model.skills, model.parameter_count) == ("tiny", ("query", "point"), 3_000_000_000)
    assert model.defaults[0].reasoning is False
    assert model.defaults[1].max_tokens is None
    assert (client.load().output_tokens_per_second, client.load().requests_per_second) == (6.5, 7.5)


def test_the_server_tells_about_its_engines_and_processes(client: Client):
    info = client.server_info()
    one, two = info.engines
    assert (one.index, one.device, one.device_uuid, one.max_running_requests) == (0, "cuda", "1a2b", 5)
    assert one.memory_plan is not None
    assert (one.memory_plan.total_bytes, one.memory_plan.adapter_bytes) == (2**34, 7)
    assert two == EngineInfo(1, "", "", 0, None)
    assert one.device_name == "A GPU"
    assert (info.frontend_count, info.settings) == (4, {"kv_dtype": "float8"})
    load = client.load()
    assert [engine.status for engine in load.engines] == list(EngineStatus)
    whole = Load(1, 2, 3, 4, 5, output_tokens_per_second=6.5, requests_per_second=7.5)
    assert load.engines[0] == EngineLoad(0, "cuda", EngineStatus.SERVING, 4712, whole)
    assert load.engines[2] == EngineLoad(2, "", EngineStatus.RECOVERING, None, None)
    assert load.frontends == (FrontendLoad("frontend-0", 4711, 8),)


def test_usage_is_that_of_each_caller(client: Client):
    assert client.usage() == (CallerUsage("alice", 1, 2, 3, 4, 5, 6),)


def test_operators_clear_caches_and_cancel_requests(client: Client):
    assert client.clear_cache() == ClearedCache(page_count=3, image_count=4, crop_count=5)
    assert client.clear_cache(token="alice").page_count == 1
    assert client.clear_cache(namespace="yard").page_count == 2
    assert client.cancel_requests(request_id="r") == 1
    assert client.cancel_requests(token="alice") == 2


def test_operators_list_load_and_unload_adapters(client: Client):
    assert client.list_adapters() == (Adapter("colours", "ab", request_count=3, is_current=True),)
    assert client.load_adapter("a@2") == Adapter("a@2", "cd", request_count=0, is_current=True)
    assert client.unload_adapter("a@2") == Adapter("a@2", "cd", request_count=1, is_current=False)


def test_operators_remove_adapters(client: Client):
    assert client.delete_adapter("a@2") == 2
    with pytest.raises(KestrelClientError, match="there is none"):
        client.delete_adapter("absent")


def test_an_adapter_is_uploaded_from_a_folder_or_a_file(client: Client, tmp_path: Path):
    weights = bytes(range(251)) * 8_400  # more than two parts
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    alone = hashlib.sha256(weights).hexdigest()
    assert client.upload_adapter("a@2", tmp_path) == UploadedAdapter("a@2", alone, replaced=False)
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    both = hashlib.sha256(b"{}" + weights).hexdigest()
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        assert client.upload_adapter("taken", path, replace=True) == UploadedAdapter("taken", both, replaced=True)
    (tmp_path / "other.safetensors").write_bytes(weights)
    assert client.upload_adapter("a", tmp_path / "other.safetensors").digest == alone
    with pytest.raises(KestrelClientError, match="it is taken"):
        client.upload_adapter("taken", tmp_path)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ((), "has no .safetensors files"),
        (("a.safetensors", "b.safetensors"), "has 2 .safetensors files and no adapter_model.safetensors"),
        (("adapter_model.bin",), "has no .safetensors files"),
    ],
)
def test_a_folder_without_an_adapter_is_not_uploaded(
    client: Client, tmp_path: Path, files: tuple[str, ...], text: str
):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=text):
        client.upload_adapter("a", tmp_path)
    with pytest.raises(InvalidRequest, match="pickled files are not taken"):
        client.upload_adapter("a", tmp_path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError):
        client.upload_adapter("a", tmp_path / "absent.safetensors")


def test_an_adapter_is_named_in_the_options(client: Client, vision: CannedVision):
    client.complete_query(PICTURE, "q", adapter="a@2")
    assert vision.requests[-1].options.adapter == "a@2"


def test_cached_tokens_are_told(client: Client):
    assert client.complete_query(PICTURE, "q").usage.cached_token_count == 730


def test_every_call_has_a_deadline(client: Client, vision: CannedVision):
    client.point(PICTURE, "kite")
    client.point(PICTURE, "kite", timeout_s=5)
    assert 6 < vision.time_left_s[0] < 121
    assert vision.time_left_s[1] < 6


def test_a_request_id_travels_as_metadata(client: Client, vision: CannedVision):
    client.point(PICTURE, "kite", request_id="mine")
    stream = client.query(PICTURE, "q")
    stream.result()
    assert vision.metadata[0]["x-request-id"] == "mine"
    assert vision.metadata[1]["x-request-id"] == stream.request_id != ""


def test_a_token_goes_with_every_call(address: str, vision: CannedVision):
    with Client(address, token="secret") as client:
        client.point(PICTURE, "kite", request_id="mine")
        client.query(PICTURE, "q").result()
    assert [metadata["authorization"] for metadata in vision.metadata] == ["Bearer secret"] * 2
    assert vision.metadata[0]["x-request-id"] == "mine"


def test_without_a_token_none_goes(client: Client, vision: CannedVision):
    client.point(PICTURE, "kite")
    assert "authorization" not in vision.metadata[0]


def test_an_address_goes_in_place_of_an_image(client: Client, vision: CannedVision):
    client.point("https://example.com/kite.png", "kite")
    assert vision.requests[0].image.uri == "https://example.com/kite.png"


def test_a_deadline_that_passes_is_told_as_such(client: Client, vision: CannedVision):
    vision.endless = True
    with pytest.raises(DeadlineExceeded):
        client.query(PICTURE, "q", timeout_s=0.2).result()


def test_a_dropped_stream_cancels_its_call(client: Client, vision: CannedVision):
    vision.endless = True
    for _ in client.query(PICTURE, "q"):
        break
    assert vision.cancelled.wait(canned.MAX_WAIT_S)


def test_leaving_the_block_of_a_stream_cancels_its_call(client: Client, vision: CannedVision):
    vision.endless = True
    with client.query(PICTURE, "q") as stream:
        next(stream)
    assert vision.cancelled.wait(canned.MAX_WAIT_S)
    with pytest.raises(Cancelled):
        stream.result()


def test_cancelling_a_finished_stream_does_nothing(client: Client):
    stream = client.query(PICTURE, "q")
    result = stream.result()
    stream.cancel()
    assert stream.result() == result


def test_closing_the_client_ends_open_streams(address: str, vision: CannedVision):
    vision.endless = True
    with Client(address) as client:
        stream = client.query(PICTURE, "q")
        next(stream)
    with pytest.raises(Cancelled):
        stream.result()
    assert vision.cancelled.wait(canned.MAX_WAIT_S)


def test_failures_of_streams_and_of_single_answers_are_the_same_errors(client: Client, vision: CannedVision):
    refused = canned.status(code_pb2.INVALID_ARGUMENT, "no", canned.error_info("INVALID_REQUEST"))
    vision.failures = [refused, refused]
    with pytest.raises(InvalidRequest):
        client.query(PICTURE, "q").result()
    with pytest.raises(InvalidRequest):
        client.point(PICTURE, "kite")


def test_without_a_server_calls_fail_soon():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Client(f"127.0.0.1:{unused.getsockname()[1]}") as client, pytest.raises(Unavailable):
            client.load()


def test_an_unknown_option_is_refused_before_anything_is_sent(client: Client, vision: CannedVision):
    options: dict[str, Any] = {"temprature": 1.0}
    with pytest.raises(TypeError, match="temprature"):
        client.point(PICTURE, "kite", **options)
    assert vision.requests == []


def test_a_stream_that_ends_without_a_result_is_the_servers_fault():
    events = TextEvents(canned.query_result)
    with pytest.raises(ServerError, match="without a result") as caught:
        _ = events.result
    assert caught.value.reason == "RESULT_MISSING"
