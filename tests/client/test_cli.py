"""The command line, against a canned server."""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2
from PIL import Image

from kestrel_client import Box, Segment
from kestrel_client.drawing import COLOURS
from kestrel_client.v1 import generation_pb2
from kestrel_grpc.cli.ask import add_client_commands
from kestrel_grpc.cli.commands import run
from tests.client import canned
from tests.client.canned import CannedVision


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "picture.png"
    Image.new("RGB", (200, 100), "white").save(path)
    return str(path)


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="kestrel-grpc")
    add_client_commands(parser.add_subparsers(required=True))
    arguments = parser.parse_args(words)
    return arguments.run(arguments)


def test_a_query_prints_its_answer(address: str, picture: str, capsys: pytest.CaptureFixture[str]):
    assert _run("query", picture, "what?", "--address", address) == 0
    assert capsys.readouterr() == ("A red kite – höher.\n", "")


def test_what_a_server_says_does_not_steer_a_terminal(
    address: str, vision: CannedVision, picture: str, capsys: pytest.CaptureFixture[str]
):
    vision.answer_pieces = ("a\x1b]0;title\x07", "\x9b31m\r\u202eb\n\tc")
    safe = "a\\x1b]0;title\\x07\\x9b31m\\r\\u202eb\n\tc\n"
    assert _run("query", picture, "what?", "--address", address) == 0
    assert capsys.readouterr().out == safe
    assert _run("query", picture, picture, "what?", "--json", "--address", address) == 0
    printed = capsys.readouterr().out
    assert [json.loads(line)["answer"] for line in printed.splitlines()] == ["".join(vision.answer_pieces)] * 2
    assert not set(printed) & set("\x1b\x07\x9b\r\u202e")
    vision.failures = [canned.status(code_pb2.INVALID_ARGUMENT, "no model \x1b[2J")]
    assert _run("query", picture, "what?", "--address", address) == 1
    assert "no model \\x1b[2J" in capsys.readouterr().err


def test_a_mistake_in_the_words_is_printed_before_the_usage(capsys: pytest.CaptureFixture[str]):
    for words in (["caption", "a.png", "--length", "huge\x1b[2J"], ["batch", "a"], ["query"], ["adapter"]):
        with pytest.raises(SystemExit) as ended:
            run(words)
        assert ended.value.code == 2
        first, second, *_ = capsys.readouterr().err.splitlines()
        assert first.startswith(f"kestrel-grpc {words[0]}: error: ")
        assert second.startswith("usage: ")
        assert "\x1b" not in first


def test_a_query_may_do_without_an_image(address: str, vision: CannedVision):
    assert _run("query", "-", "what?", "--address", address) == 0
    assert not vision.requests[0].HasField("image")


def test_reasoning_goes_beside_the_answer(address: str, picture: str, capsys: pytest.CaptureFixture[str]):
    assert _run("query", picture, "what?", "--reasoning", "--address", address) == 0
    assert capsys.readouterr() == ("A red kite – höher.\n", f"{canned.THOUGHT}\n")


def test_text_comes_out_while_it_is_being_written(address: str, vision: CannedVision):
    vision.endless = True
    code = (
        "import argparse, sys; from kestrel_grpc.cli.ask import add_client_commands;"
        "parser = argparse.ArgumentParser(); add_client_commands(parser.add_subparsers());"
        "arguments = parser.parse_args(); sys.exit(arguments.run(arguments))"
    )
    command = [sys.executable, "-W", "error", "-c", code, "query", "-", "what?", "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100).decode() == canned.ANSWER_PIECES[0]
        process.send_signal(2)
        _, complaint = process.communicate(timeout=canned.MAX_WAIT_S)
    assert (process.returncode, complaint) == (130, b"")
    assert vision.cancelled.wait(canned.MAX_WAIT_S)


def test_a_caption_has_the_length_asked_for(
    address: str, picture: str, vision: CannedVision, capsys: pytest.CaptureFixture[str]
):
    assert _run("caption", picture, "--length", "long", "--address", address) == 0
    assert capsys.readouterr().out == "Two boxes.\n"
    assert vision.requests[0].length == 3


def test_places_are_printed_one_a_line(address: str, picture: str, capsys: pytest.CaptureFixture[str]):
    for command in ("point", "detect", "segment"):
        assert _run(command, picture, "kite", "--address", address) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0.2500 0.5000",
        "0.7500 1.0000",
        "0.2500 0.1250 0.7500 0.5000",
        "0.2500 0.1250 0.7500 0.5000 M 0 0 L 1 0 L 1 1 Z",
    ]


def test_the_least_score_is_sent(address: str, picture: str, vision: CannedVision):
    vision.score = 0.5
    for command in (
        ["point", picture],
        ["detect", picture],
        ["detect", picture, picture],
        ["point", picture, "--json"],
    ):
        name, *images = [word for word in command if word != "--json"]
        flags = ["--json"] if "--json" in command else []
        assert _run(name, *images, "kite", "--min-score", "0.5", *flags, "--address", address) == 0
    assert [request.min_score for request in vision.requests] == [0.5] * 5


def test_an_outline_that_is_partial_or_missing_is_told_apart(
    address: str, picture: str, capsys: pytest.CaptureFixture[str]
):
    for object in ("cloud", "unicorn"):
        assert _run("segment", picture, object, "--address", address) == 0
    complaints = "kestrel-grpc: the outline is not complete\nkestrel-grpc: no unicorn found\n"
    assert capsys.readouterr() == (f"0.2500 0.1250 0.7500 0.5000 {canned.SVG_PATH}\n", complaints)


def test_outlines_are_printed_in_forms_of_coco_and_written_as_masks(
    address: str, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mask, whole = tmp_path / "mask.png", Segment(canned.SVG_PATH, Box(0.25, 0.125, 0.75, 0.5))
    outline = ("segment", picture, "kite", "--address", address)
    assert _run(*outline, "--mask-format", "rle") == 0
    assert json.loads(capsys.readouterr().out) == whole.to_rle(200, 100)
    assert _run(*outline, "--mask-format", "polygon") == 0
    assert json.loads(capsys.readouterr().out) == [[50, 12.5, 150, 12.5, 150, 50, 50, 12.5]]
    assert _run(*outline, "--mask-format", "png", "--mask", str(mask)) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        f"0.2500 0.1250 0.7500 0.5000 {canned.SVG_PATH}\n",
        f"kestrel-grpc: mask written to {mask}\n",
    )
    assert mask.read_bytes() == whole.to_png(200, 100)
    assert _run(*outline, "--json", "--mask-format", "rle") == 0
    assert json.loads(capsys.readouterr().out)["masks"] == [whole.to_rle(200, 100)]
    other = tmp_path / "other.png"
    Image.new("RGB", (20, 10)).save(other)
    both = ("segment", picture, str(other), "kite", "--address", address)
    assert _run(*both, "--mask", str(tmp_path / "masks"), "--mask-format", "rle") == 0
    assert capsys.readouterr().out.count('{"size": [100, 200], "counts": ') == 2
    assert sorted(path.name for path in (tmp_path / "masks").iterdir()) == ["other.png", "picture.png"]
    assert _run("segment", picture, "unicorn", "--mask", str(mask), "--address", address) == 0
    with Image.open(mask) as empty:
        assert (empty.size, empty.getbbox()) == ((200, 100), None)


def test_a_png_needs_a_file(address: str, picture: str, capsys: pytest.CaptureFixture[str]):
    assert _run("segment", picture, "kite", "--mask-format", "png", "--address", address) != 0
    assert "--mask-format png needs --mask" in capsys.readouterr().err


def test_embeddings_are_printed_or_written_for_numpy(
    address: str, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "mean.npy"
    assert _run("embed", picture, "--address", address) == 0
    assert capsys.readouterr().out == "0.5 -1 0.25\n"
    assert _run("embed", picture, "--json", "--normalize", "--address", address) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == [0.5, -1.0, 0.25]
    assert _run("embed", picture, "--out", str(out), "--address", address) == 0
    assert np.load(out).tolist() == [0.5, -1.0, 0.25]
    assert _run("embed", picture, picture, "--out", str(out), "--address", address) == 0
    assert np.load(out).tolist() == [[0.5, -1.0, 0.25]] * 2
    assert np.load(out).dtype == np.float32
    printed = capsys.readouterr()
    assert printed.out == f"{picture}\n" * 2
    assert printed.err.count(f"written to {out}") == 2
    for flags, dtype in (([], "<f2"), (["--dtype", "float32"], "<f4")):
        assert _run("embed", picture, "--patches", *flags, "--out", str(out), "--address", address) == 0
        assert np.load(out).tolist() == [[1.0, -2.0, 0.5]] * 2
        assert np.load(out).dtype == dtype


def test_a_file_of_embeddings_stays_where_no_picture_has_one(address: str, picture: str, tmp_path: Path):
    out = tmp_path / "mean.npy"
    assert _run("embed", picture, picture, "--out", str(out), "--address", address) == 0
    assert _run("embed", "none.png", "no.png", "--out", str(out), "--address", address) == 1
    assert len(np.load(out)) == 2


def test_patches_need_a_file_and_one_picture(address: str, picture: str, capsys: pytest.CaptureFixture[str]):
    assert _run("embed", picture, "--patches", "--address", address) != 0
    assert _run("embed", picture, picture, "--patches", "--out", "x.npy", "--address", address) != 0
    assert capsys.readouterr().err.count("--patches needs --out, and one image") == 2


def test_the_target_of_a_gaze_is_printed_and_drawn(
    address: str, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    drawn = tmp_path / "drawn.png"
    assert _run("gaze", picture, "0.25", "0.125", "--draw", str(drawn), "--address", address) == 0
    assert Image.open(drawn).getpixel((50, 50)) == COLOURS[0]
    assert _run("gaze", picture, "0.75", "0.125", "--address", address) == 0
    complaint = "kestrel-grpc: no target found\n"
    assert capsys.readouterr() == ("0.2500 0.5000\n", f"kestrel-grpc: drawn in {drawn}\n{complaint}")


def test_json_holds_the_whole_result_in_one_line(address: str, picture: str, capsys: pytest.CaptureFixture[str]):
    for words in (["query", picture, "q"], ["caption", picture], ["point", picture, "k"], ["detect", picture, "k"]):
        assert _run(*words, "--json", "--address", address) == 0
    answer, caption, points, objects = map(json.loads, capsys.readouterr().out.splitlines())
    assert answer["answer"] == "A red kite – höher."
    assert answer["usage"]["input_token_count"] == 740
    assert caption["caption"] == "Two boxes."
    assert points["points"][0] == {"x": 0.25, "y": 0.5}
    assert objects["objects"][0]["box"]["y_max"] == 0.5


def test_every_setting_reaches_the_server(address: str, picture: str, vision: CannedVision):
    sampling = ["--temperature", "0", "--top-p", "0.5", "--max-tokens", "7", "--seed", "3"]
    others = ["--max-objects", "2", "--timeout", "9", "--address", address]
    assert _run("detect", picture, "kite", *sampling, *others) == 0
    request = vision.requests[0]
    assert request.sampling.HasField("temperature")
    assert (request.sampling.top_p, request.sampling.max_tokens, request.sampling.seed) == (0.5, 7, 3)
    assert request.max_objects == 2
    assert vision.time_left_s[0] < 10


def test_every_setting_of_a_query_reaches_the_server(
    address: str, vision: CannedVision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sampling = [
        "--stop",
        "a",
        "b",
        "--include-stop",
        "--n",
        "2",
        "--logprobs",
        "1",
        "--top-k",
        "5",
        "--min-p",
        "0.5",
    ]
    penalties = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "0.25"]
    handling = ["--adapter", "gold", "--priority", "batch", "--cache", "bypass", "--max-queue", "3", "--model", "m"]
    query = ("query", "-", "q", "--address", address, *sampling, *penalties, *handling)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    for constraint in (
        ["--choices", "yes", "no"],
        ["--regex", "a+"],
        ["--json-schema", '{"type": "null"}'],
        ["--json-schema", str(schema)],
    ):
        assert _run(*query, *constraint) == 0
    assert capsys.readouterr().out == "A red kite – höher.\n" * 4
    first, *others = vision.requests
    assert first.sampling == generation_pb2.SamplingParams(
        stop=["a", "b"],
        include_stop=True,
        n=2,
        logprobs=1,
        top_k=5,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert first.options == generation_pb2.RequestOptions(
        model="m",
        adapter="gold",
        priority=generation_pb2.PRIORITY_BATCH,
        cache=generation_pb2.CACHE_POLICY_BYPASS,
        max_queue_duration=duration_pb2.Duration(seconds=3),
    )
    assert first.constraint.choices.values == ["yes", "no"]
    assert [request.constraint.regex for request in others] == ["a+", "", ""]
    assert [request.constraint.json_schema for request in others] == ["", '{"type": "null"}', '{"type": "null"}']


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, width in (("b.PNG", 20), ("a.png", 10)):
        Image.new("RGB", (width, 10), "white").save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    return folder


def test_several_pictures_and_folders_are_asked_about_in_order(
    address: str, picture: str, folder: Path, vision: CannedVision, capsys: pytest.CaptureFixture[str]
):
    names = [picture, str(folder / "a.png"), str(folder / "b.PNG")]
    assert run(["query", picture, str(folder), "--address", address, "what?"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name}: A red kite – höher." for name in names]
    assert {request.question for request in vision.requests} == {"what?"}
    assert run(["detect", picture, str(folder), "kite", "--json", "--max-objects", "2", "--address", address]) == 0
    told = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [result["image"] for result in told] == names
    assert vision.requests[-1].max_objects == 2
    for command in (["caption", "--length", "long"], ["segment", "kite"], ["gaze", "0.25", "0.5"]):
        assert run([command[0], str(folder), *command[1:], "--address", address]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_failed_picture_does_not_stop_the_others(
    address: str, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    missing = str(tmp_path / "none.png")
    assert run(["caption", missing, picture, "--address", address]) == 1
    told = capsys.readouterr()
    assert told.out == f"{picture}: Two boxes.\n"
    assert told.err == f"kestrel-grpc: {missing}: {missing}: No such file or directory\n"


def test_a_folder_without_pictures_is_told(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["caption", str(tmp_path), "--address", address]) == 1
    assert "the folder holds no pictures (.bmp, " in capsys.readouterr().err


def test_several_pictures_are_drawn_into_a_folder(
    address: str, picture: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    drawn = tmp_path / "all" / "drawn"
    detect = ["detect", str(folder), "kite", "--address", address, "--draw"]
    assert run([*detect, str(drawn)]) == 0
    assert sorted(path.name for path in drawn.iterdir()) == ["a.png", "b.PNG"]
    assert f"kestrel-grpc: drawn in {drawn / 'a.png'}" in capsys.readouterr().err
    assert run([*detect, picture]) == 1
    assert capsys.readouterr().err == f"kestrel-grpc: {picture}: must be a folder for several pictures\n"
    assert run(["detect", str(folder), str(folder), "kite", "--address", address, "--draw", str(drawn)]) == 1
    assert "two pictures are named a.png" in capsys.readouterr().err


def test_the_name_of_the_file_says_how_it_is_drawn(
    address: str, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, format in (("x.jpg", "JPEG"), ("x.png", "PNG"), ("x.webp", "WEBP")):
        target = tmp_path / name
        assert _run("detect", picture, "kite", "--draw", str(target), "--address", address) == 0
        assert capsys.readouterr().err == f"kestrel-grpc: drawn in {target}\n"
        with Image.open(target) as drawn:
            assert drawn.format == format
    assert _run("detect", picture, "kite", "--draw", str(tmp_path / "x.abc"), "--address", address) == 1
    assert "x.abc: is no name of a picture, such as drawn.png" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "place"), [("point", (50, 50)), ("detect", (50, 12)), ("segment", (100, 12))])
def test_what_was_found_is_drawn_on_the_image(
    command: str, place: tuple[int, int], address: str, picture: str, tmp_path: Path
):
    drawn = tmp_path / "drawn.png"
    assert _run(command, picture, "kite", "--draw", str(drawn), "--address", address) == 0
    assert Image.open(drawn).getpixel(place) == COLOURS[0]


def test_a_refusal_is_one_line_that_lists_what_is_wrong(
    address: str, picture: str, vision: CannedVision, capsys: pytest.CaptureFixture[str]
):
    bad_request = error_details_pb2.BadRequest()
    bad_request.field_violations.add(field="sampling.top_p", description="must be above 0")
    vision.failures = [canned.status(code_pb2.INVALID_ARGUMENT, "x", canned.error_info("R"), bad_request)]
    assert _run("query", picture, "q", "--top-p", "0", "--address", address) == 1
    assert capsys.readouterr() == ("", "kestrel-grpc: sampling.top_p: must be above 0\n")


def test_a_failure_of_the_server_names_the_request_to_look_for(
    address: str, picture: str, vision: CannedVision, capsys: pytest.CaptureFixture[str]
):
    info = canned.error_info("INTERNAL", requestId="r-7")
    vision.failures = [canned.status(code_pb2.INTERNAL, "internal error", info)]
    assert _run("caption", picture, "--address", address) == 1
    assert "r-7" in capsys.readouterr().err


def test_a_missing_server_is_named(picture: str, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert _run("caption", picture, "--address", address) == 1
    assert capsys.readouterr().err == f"kestrel-grpc: no server listens at {address}: connection refused\n"


def test_an_unknown_host_name_is_told_apart_from_a_server_that_is_down(
    picture: str, capsys: pytest.CaptureFixture[str]
):
    assert _run("caption", picture, "--address", "no-such-host.invalid:50051") == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("kestrel-grpc: the name no-such-host.invalid cannot be resolved: ")
    assert complaint.count("\n") == 1


def test_a_wrong_token_is_told_from_a_missing_one(
    address: str, vision: CannedVision, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    refusal = canned.status(code_pb2.UNAUTHENTICATED, "x", canned.error_info("TOKEN_INVALID"))
    vision.failures = [refusal] * 3
    query = ("query", "-", "q", "--address", address)
    assert _run(*query) == 1
    asked = "kestrel-grpc: the server asks for a token; give token, --token or KESTREL_GRPC_TOKEN\n"
    assert capsys.readouterr().err == asked
    monkeypatch.setenv("KESTREL_GRPC_TOKEN", "")
    assert _run(*query) == 1
    assert "asks for a token" in capsys.readouterr().err
    assert _run(*query, "--token", "wrong") == 1
    complaint = capsys.readouterr().err
    assert complaint == (
        "kestrel-grpc: the server does not know the token from token, --token or KESTREL_GRPC_TOKEN\n"
    )


def test_a_server_that_takes_too_long_is_given_up(
    address: str, vision: CannedVision, capsys: pytest.CaptureFixture[str]
):
    vision.endless = True
    assert _run("query", "-", "q", "--timeout", "0.2", "--address", address) == 1
    assert "no answer within 0.2 s" in capsys.readouterr().err


def test_a_missing_image_is_named(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing = tmp_path / "none.png"
    for words in (["caption", str(missing)], ["point", str(missing), "kite"]):
        assert _run(*words, "--address", address) == 1
        assert capsys.readouterr().err == f"kestrel-grpc: {missing}: No such file or directory\n"


def test_a_number_too_large_for_its_field_is_one_line_too(
    address: str, picture: str, capsys: pytest.CaptureFixture[str]
):
    assert _run("caption", picture, "--max-tokens", "99999999999", "--address", address) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [[], ["caption"], ["query", "a.png"], ["caption", "a.png", "--length", "epic"], ["point", "a.png"]]
)
def test_wrong_usage_exits_with_two(words: list[str]):
    with pytest.raises(SystemExit) as exited:
        _run(*words)
    assert exited.value.code == 2


@pytest.mark.parametrize("command", ["detect", "point"])
def test_several_objects_are_one_call_whose_lines_name_them(
    command: str, address: str, vision: CannedVision, picture: str, capsys: pytest.CaptureFixture[str]
):
    words = ("--object", "dog", "--object", "cat", "--address", address)
    assert _run(command, picture, "kite", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list(dict.fromkeys(line.partition(": ")[0] for line in lines)) == ["kite", "dog", "cat"]
    (request,) = vision.requests
    assert (request.object, list(request.objects)) == ("", ["kite", "dog", "cat"])


def test_an_object_without_an_answer_is_named_and_sets_the_status(
    address: str, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("kite", "--object", "unicorn", "--address", address)
    assert _run("detect", picture, *words) == 1
    shown = capsys.readouterr()
    assert shown.err == "kestrel-grpc: unicorn: no\n"
    assert shown.out.startswith("kite: 0.2500 ")
    assert _run("detect", picture, *words, "--json") == 1
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert [(group["object"], group["error"]) for group in groups] == [("kite", None), ("unicorn", "no")]
    assert run(["detect", picture, picture, *words]) == 1
    assert f"kestrel-grpc: {picture}: unicorn: no\n" in capsys.readouterr().err
