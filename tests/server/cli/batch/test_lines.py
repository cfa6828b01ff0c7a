"""Records of a batch, the requests that they become, and the lines of answers."""

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.cli.batch.lines import (
    InputUnusable,
    Line,
    Record,
    Template,
    answer_line,
    fields_missing_in_all,
    fields_of,
    is_failure,
    open_source,
    reason_of,
    refusal_line,
)
from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.api.sampling_params import MAX_SEED
from tests.reference_fixtures import CHECKOUT

PICTURE = CHECKOUT / "kestrel_grpc" / "demo_picture.png"


def line_of(content: Any, template: Template | None = None, number: int = 1) -> Line:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Line.read(Record(number, "", data), template or Template())


def body_of(content: Any, template: Template | None = None, number: int = 1) -> dict[str, Any]:
    line = line_of(content, template, number)
    assert line.violations == []
    return json.loads(line.body())


def refused(content: Any, template: Template | None = None) -> dict[str, str]:
    """What is wrong with a line, by field."""
    return {item.field: item.description for item in line_of(content, template).violations}


def test_a_line_becomes_the_request_of_its_skill():
    line = line_of({"id": "a", "skill": "detect", "object": "kite", "settings": {"max_objects": 3}, "cache": None})
    assert (line.path, line.id) == ("/v1/detect", "a")
    assert json.loads(line.body()) == {"object": "kite", "settings": {"max_objects": 3, "seed": 1}}


def test_a_line_has_what_it_does_not_say_from_the_template():
    fields = {"question": "what?", "settings": {"temperature": 0, "max_tokens": 9}}
    template = Template("query", fields, seed=100)
    assert body_of({"settings": {"max_tokens": 3}}, template, 7) == {
        "question": "what?",
        "settings": {"temperature": 0, "max_tokens": 3, "seed": 107},
    }
    assert line_of({"skill": "caption"}, template).path == "/v1/caption"


def test_the_seed_of_a_line_follows_from_its_number_or_is_given():
    assert body_of({"skill": "query", "settings": {"seed": 5}}, number=3)["settings"]["seed"] == 5
    assert body_of({"skill": "query"}, Template(seed=MAX_SEED), number=3)["settings"]["seed"] == 2
    chat = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"model": "m"}}
    assert body_of(chat, number=3) == {"model": "m", "seed": 3}
    assert body_of({**chat, "body": {"seed": 8}}) == {"seed": 8}


@pytest.mark.parametrize(
    "image",
    ["https://example.com/a.png", "data:image/png;base64,AAAA", f"sha256:{'a' * 64}", "iVBORw0K" + "A" * 40],
)
def test_an_image_that_the_server_finds_is_passed_on(image):
    assert body_of({"skill": "caption", "image": image})["image_url"] == image


def test_an_image_file_is_found_beside_the_input(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kite.png").write_bytes(b"an image")
    template = Template("caption", folder=tmp_path)
    for name in ("a/kite.png", str(tmp_path / "a" / "kite.png")):
        assert base64.b64decode(body_of({"image": name}, template)["image_url"]) == b"an image"


def test_an_image_that_is_nowhere_is_named(tmp_path):
    template = Template("caption", folder=tmp_path)
    assert refused({"image": "none.png"}, template) == {"image": f"there is no file {tmp_path}/none.png"}
    assert refused({"image": "a"}, template) == {"image": f"there is no file {tmp_path}/a"}
    assert refused({"image": str(tmp_path)}, template) == {"image": f"there is no file {tmp_path}"}
    assert refused({"image": "a\0b"}, template)["image"].startswith("there is no file")
    assert "must be a text" in refused({"image": 5}, template)["image"]
    assert "cannot be combined" in refused({"image": "data:,", "image_url": "data:,"}, template)["image"]


def test_messages_of_a_conversation_have_images_of_their_own(tmp_path):
    (tmp_path / "a.png").write_bytes(b"first")
    messages = [
        {"role": "user", "content": "What?", "images": ["a.png", "https://example.com/b.png"]},
        {"role": "assistant", "content": "A bird."},
        {"role": "user", "content": "And here?", "image_urls": ["sha256:" + "a" * 64]},
    ]
    line = line_of({"skill": "chat", "messages": messages}, Template(folder=tmp_path))
    assert (line.path, line.violations, line.reads_file) == ("/v1/chat", [], True)
    sent = json.loads(line.body())["messages"]
    assert [message.get("image_urls") for message in sent] == [
        [base64.b64encode(b"first").decode(), "https://example.com/b.png"],
        None,
        ["sha256:" + "a" * 64],
    ]
    assert "images" not in sent[0]
    wrong = [{"images": ["no.png", 3]}, {"images": "a.png"}, {"images": [], "image_urls": []}]
    line = line_of({"skill": "chat", "messages": wrong}, Template(folder=tmp_path))
    assert [violation.field for violation in line.violations] == [
        "messages[0].images[0]",
        "messages[0].images[1]",
        "messages[1].images",
        "messages[2].images",
    ]


def test_an_image_of_a_message_that_is_gone_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"first")
    messages = [{"role": "user", "content": "What?", "images": ["a.png"]}]
    line = line_of({"skill": "chat", "messages": messages}, Template(folder=tmp_path))
    (tmp_path / "a.png").unlink()
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.images\[0\]: cannot be read: No such file"):
        line.body()


def test_everything_wrong_with_a_line_is_told_at_once():
    assert refused({"id": True, "skill": "qeury", "image": [], "stream": True}).keys() == {
        *("id", "skill", "image", "stream")
    }
    assert "did you mean query?" in refused({"skill": "qeury"})["skill"]
    assert refused({"id": 1}) == {"skill": "is required, in the line or by --skill"}
    assert refused(
        {"custom_id": 1, "method": "GET", "url": "http://other/v1/query", "body": [], "skill": "q"}
    ).keys() == {*("custom_id", "method", "url", "body", "skill")}
    assert refused({"custom_id": "a", "url": "/v1/completions", "body": {"stream": True}}).keys() == {"body.stream"}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_a_line_that_is_no_object_is_a_failed_line(content):
    written = refusal_line(line_of(content, number=3))
    assert written.is_failure
    document = json.loads(written.data)
    assert (document["id"], document["error"]["code"], document["error"]["status"]) == (3, "INVALID_REQUEST", 400)


def test_an_answer_leaves_out_ids_of_requests_and_times():
    line = line_of({"id": "a", "skill": "query", "question": "?"})
    metrics = {"input_tokens": 3, "cached_tokens": 2, "output_tokens": 4, "ttft_ms": 1.0, "decode_time_ms": 2.0}
    answer = {"request_id": "r", "model": "m", "answer": "é", "finish_reason": "stop", "metrics": metrics}
    written = answer_line(line, 200, answer)
    assert written.data.decode() == (
        '{"id":"a","model":"m","answer":"é","finish_reason":"stop","metrics":{"input_tokens":3,"output_tokens":4}}\n'
    )
    assert not written.is_failure
    kestrel = {"points": [], "ttft_s": 1.0, "decode_tokens_per_s": 2.0, "cached_tokens": 1, "output_tokens": 2}
    assert json.loads(answer_line(line, 200, kestrel).data) == {"id": "a", "points": [], "output_tokens": 2}


def test_an_answer_of_openai_has_the_shape_of_its_batches():
    line = line_of({"custom_id": "a", "url": "/v1/chat/completions", "body": {}}, number=4)
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    written = json.loads(answer_line(line, 200, {"id": "chatcmpl-batch-4", "created": 12, "usage": usage}).data)
    body = {"id": "chatcmpl-batch-4", "usage": {"prompt_tokens": 3}}
    response = {"status_code": 200, "request_id": "batch-4", "body": body}
    assert written == {"id": "batch_req_4", "custom_id": "a", "response": response, "error": None}
    refusal = json.loads(refusal_line(line_of({"custom_id": "a", "url": "?", "body": {}})).data)
    assert (refusal["response"], refusal["error"]["code"]) == (None, "invalid_request")


def test_a_failed_line_is_known_again():
    rest, openai = line_of({"skill": "query"}), line_of({"custom_id": "a", "url": "/v1/completions", "body": {}})
    failure = {"error": {"code": "QUEUE_TIMEOUT"}}
    for line in (rest, openai):
        assert is_failure(answer_line(line, 503, failure).data)
        assert not is_failure(answer_line(line, 200, {"answer": 'an "error": it is'}).data)
    assert is_failure(refusal_line(line_of(b"{")).data)
    assert is_failure(refusal_line(line_of({"custom_id": 1, "body": {}})).data)


def test_fields_are_json_or_texts():
    given = [
        "question=What is it?",
        "settings.max_tokens=32",
        'settings.stop=["a"]',
        "reasoning=true",
        "object=a=b",
    ]
    assert fields_of(given) == {
        "question": "What is it?",
        "settings": {"max_tokens": 32, "stop": ["a"]},
        "reasoning": True,
        "object": "a=b",
    }
    for text in ("question", "=a", "image=a.png"):
        with pytest.raises(ValueError, match="--field"):
            fields_of([text])


def test_empty_lines_are_no_records_and_the_last_needs_no_line_feed(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\n{"id":1}\r\n  \n{"id":2}')
    source = open_source(path)
    assert [(record.number, record.content) for record in source] == [(1, b'{"id":1}'), (2, b'{"id":2}')]
    assert source.share_read() == 1.0


def test_pictures_of_a_folder_come_by_name(tmp_path):
    for name in ("b.png", "a/2.JPG", "a/1.webp", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    source = open_source(tmp_path)
    first, *others = source
    assert Line.read(first, Template("caption")).id == "a/1.webp"
    assert json.loads(Line.read(first, Template("caption")).body())["image_url"] == "YS8xLndlYnA="
    assert [Line.read(record, Template("caption")).id for record in others] == ["a/2.JPG", "b.png"]
    (tmp_path / "b.png").write_bytes(b"changed")
    assert [record.digest for record in open_source(tmp_path)][:2] == [first.digest, others[0].digest]
    assert list(open_source(tmp_path))[2].digest != others[1].digest
    with pytest.raises(InputUnusable, match="holds no pictures"):
        open_source((tmp_path / "empty").mkdir() or tmp_path / "empty")


def test_rows_of_a_parquet_file_are_lines(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"id": 1, "image": {"bytes": b"an image", "path": None}, "question": "a?", "settings": {"max_tokens": 3}},
        {"id": 2, "image": None, "question": "b?", "settings": None},
    ]
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = open_source(path)
    first, second = source
    assert source.share_read() == 1.0
    template = Template("query")
    assert json.loads(Line.read(first, template).body()) == {
        "question": "a?",
        "settings": {"max_tokens": 3, "seed": 1},
        "image_url": base64.b64encode(b"an image").decode(),
    }
    assert json.loads(Line.read(second, template).body()) == {"question": "b?", "settings": {"seed": 2}}
    assert [record.digest for record in open_source(path)] == [first.digest, second.digest]
    assert first.digest != second.digest


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputUnusable, match=r"pip install 'kestrel-grpc\[parquet\]'"):
        open_source(tmp_path / "in.parquet")


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "in.parquet").write_text("no")
    with pytest.raises(InputUnusable, match="is no Parquet file"):
        open_source(tmp_path / "in.parquet")
    with pytest.raises(InputUnusable, match="No such file"):
        open_source(tmp_path / "none.parquet")


def test_a_file_that_is_too_large_for_an_image_is_refused(tmp_path: Path):
    with (tmp_path / "film.png").open("wb") as file:
        file.truncate(2**28 + 1)
    line = line_of({"skill": "caption", "image": "film.png"}, Template(folder=tmp_path))
    with pytest.raises(InvalidRequest, match="more than"):
        line.body()


def test_a_skill_of_the_command_line_that_does_not_exist_is_refused_before_any_line():
    with pytest.raises(ValueError, match=r"--skill qury: must be one of query, .*did you mean query"):
        Template("qury")


NAMES = (
    b"caf\xe9.png",
    b"two\nlines.png",
    b"\x1b[31mred.png",
    b"-o.png",
    b"\xff\xfe.JPG",
    "ä.png".encode(),
    b'a"\\b.png',
)


def test_pictures_with_any_name_are_read(tmp_path):
    for name in NAMES:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
            file.write(name)
    lines = [Line.read(record, Template("caption")) for record in open_source(tmp_path)]
    read = {base64.b64decode(json.loads(line.body())["image_url"]): line.id for line in lines}
    assert read.keys() == set(NAMES)
    assert read[b"caf\xe9.png"] == "caf\\xe9.png"
    assert read["ä.png".encode()] == "ä.png"
    for line in lines:
        str(line.id).encode()


def test_a_deep_picture_is_read_and_hidden_ones_are_left_out(tmp_path):
    deep = tmp_path.joinpath(*(["x" * 200] * 6))
    deep.mkdir(parents=True)
    (tmp_path / ".thumbnails").mkdir()
    for path in (
        deep / "a.png",
        tmp_path / ".hidden.png",
        tmp_path / "._a.png",
        tmp_path / ".thumbnails" / "b.png",
    ):
        path.write_bytes(b"picture")
    (found,) = open_source(tmp_path)
    assert b"image_url" in Line.read(found, Template("caption")).body()


def test_what_has_the_name_of_a_picture_and_is_none_fails_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "good.png").write_bytes(b"picture")
    reasons = {}
    for found in open_source(tmp_path):
        line = Line.read(found, Template("caption"))
        try:
            line.body()
        except (OSError, InvalidRequest) as error:
            reasons[line.id] = str(error)
    assert reasons.keys() == {"pipe.png", "gone.png", "loop.png"}
    assert "no regular file" in reasons["pipe.png"]


def lacked(lines: list[dict[str, Any]], tmp_path: Path, template: Template) -> tuple[str, ...]:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return fields_missing_in_all(open_source(path), template)


@pytest.mark.parametrize(
    ("lines", "template", "expected"),
    [
        ([{"image": "a.png"}, {"image": "b.png"}], Template("query"), ("question",)),
        ([{"image": "a.png"}, {"question": "?"}], Template("query"), ()),
        ([{"image": "a.png"}], Template("query", {"question": "?"}), ()),
        ([{"question": "?"}], Template(), ("skill",)),
        ([{"question": "?"}, {"skill": "query", "question": "?"}], Template(), ()),
        ([{}, {}], Template("point"), ("image", "object")),
        ([{}, {"image": "a.png"}], Template("point"), ("object",)),
        ([{"image_url": "data:,"}], Template("gaze"), ("eye",)),
        ([{"skill": "caption", "image": "a.png"}, {"skill": "detect", "image": "b.png"}], Template(), ()),
        ([{"skill": "qeury"}, {"image": "a.png"}], Template("query"), ("question",)),
        ([{"question": None}], Template("query"), ("question",)),
        ([{"custom_id": "a"}], Template(), ()),
        ([], Template("query"), ()),
    ],
)
def test_a_field_that_every_line_lacks_is_found(tmp_path, lines, template, expected):
    assert lacked(lines, tmp_path, template) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            {"id": 1, "error": {"code": "QUEUE_FULL", "message": "the queue is full"}},
            "QUEUE_FULL: the queue is full",
        ),
        (
            {"custom_id": "a", "response": {"body": {"error": {"code": "x", "message": "why"}}}, "error": None},
            "X: why",
        ),
        ({"custom_id": "a", "response": None, "error": {"code": "x", "message": "why"}}, "X: why"),
    ],
)
def test_the_reason_of_a_failed_line_is_read_from_it(line, reason):
    assert reason_of(json.dumps(line).encode()) == reason
