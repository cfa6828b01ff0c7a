"""The command that proves a checkpoint: what it prints, its exit status, and the page that it writes."""

import io
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
from huggingface_hub import constants
from PIL import Image

from kestrel_grpc.__main__ import main
from kestrel_grpc.cli import accept
from kestrel_grpc.cli.scenes import scenes
from kestrel_runtime.verify.recording import Picture, call_of, query_call
from tests.hub import Hub, Repository
from tests.reference_fixtures import MD2_SMALL, copy_with_one_image, expected
from tests.runtime.models.moondream.verify.stand_ins import STAND_INS, publish

VOID = {"meta", "img"}


class Page(HTMLParser):
    """The texts of a page, and the addresses of its images. Fails where elements are not nested."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text: list[str] = []
        self.sources: list[str] = []
        self._open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "_SPEED_S", 0.0)
    monkeypatch.setattr(accept, "MAX_TOKENS", 24)


def accept_model(tmp_path: Path, *words: str) -> tuple[int, Path]:
    file = tmp_path / "page.html"
    command = ["accept", "--device", "cpu", "--set", "max-batch-size=1", "--html", str(file)]
    return main([*command, *words]), file


def test_the_built_in_model_passes_without_an_independent_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    scene = next(scenes())
    asked = [
        query_call(scene.question),
        *(call_of(skill, object="star") for skill in ("point", "detect", "segment")),
        call_of("gaze", eye=[0.5, 0.4]),
    ]
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(scene.data)) as image:
        image.resize((224, 224 * image.height // image.width)).save(buffer, "PNG")  # two crops
    picture = Picture(scene.name, buffer.getvalue(), scene.question, asked)
    monkeypatch.setattr(accept, "_drawn_pictures", lambda: iter([picture]))
    status, file = accept_model(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert (status, lines[-1]) == (0, f"passed, without an independent reference; the page is {file}")
    assert (
        lines[0] == "the checkpoint does not bring the code of the reference: answering on the plain float32 path"
    )
    page = Page(file)
    assert "Acceptance of moondream-nano" in page.text
    assert "Passed, without an independent reference" in page.text
    assert page.text.count("5") >= 2, "the number of shapes, from both"
    place = page.text.index("max_prefill_tokens")
    assert page.text.index("Options of the engine") < place
    assert page.text[place + 1] == "1024"
    assert any("1 picture (1 of 224 ×" in text for text in page.text)
    assert len(page.sources) == 2
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)


def test_a_reference_in_the_published_layout_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fixture = copy_with_one_image(MD2_SMALL, tmp_path / "fixture")
    checkpoint = publish(fixture, tmp_path / "checkpoint")
    (entry,) = expected(fixture)["images"]
    calls = [{name: call[name] for name in ("skill", "args")} for call in entry["calls"]]
    picture = Picture(entry["image"], (fixture / entry["image"]).read_bytes(), calls[0]["args"]["question"], calls)
    monkeypatch.setattr(accept, "_drawn_pictures", lambda: iter([picture]))
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    recorded = json.loads((checkpoint / "recorded.json").read_text())
    recorded["images"][0]["calls"][-1]["expect"]["points"][0]["x"] = 0.5
    (checkpoint / "recorded.json").write_text(json.dumps(recorded))
    status, file = accept_model(tmp_path, "--model", str(checkpoint))
    lines = capsys.readouterr().out.splitlines()
    assert (status, lines[-1]) == (1, f"failed; the page is {file}")
    wrong = [line for line in lines if "expected" in line and line.startswith("float32: ")]
    assert len(wrong) == 1
    assert wrong[0].startswith(f"float32: {entry['image']} point(object='License'")
    page = Page(file)
    assert "Failed" in page.text
    assert any("transformers 0 (stand-in)" in text for text in page.text)
    assert any("the reference failed in query" in text for text in page.text), "of the question without an image"


def test_a_reference_that_fails_ends_the_command_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    checkpoint = publish(copy_with_one_image(MD2_SMALL, tmp_path / "fixture"), tmp_path / "checkpoint")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'no module named einops' >&2\nexit 1\n")
    program.chmod(0o755)
    words = ("--model", str(checkpoint), "--reference-python")
    status, file = accept_model(tmp_path, *words, str(program))
    errors = capfd.readouterr().err.splitlines()
    assert (status, file.exists()) == (1, False)
    assert errors[-2] == "kestrel-grpc: no module named einops"
    assert errors[-1].endswith("the reference did not answer: status 1; --no-reference leaves it out")
    program.write_text("#!/bin/sh\nexit 3\n")
    assert accept_model(tmp_path, *words, str(program))[0] == 1
    assert f"{program} has no transformers" in capfd.readouterr().err


def test_the_engine_reads_the_revision_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files = {name: (MD2_SMALL / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    # Weights that only the engine reads, and no `main`, which a lost revision would ask for.
    repository = Repository({**files, "model.safetensors": b"no weights"}, revisions=("v2",))
    with Hub({"someone/moon": repository}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        words = ("--model", "someone/moon", "--revision", "v2", "--no-reference")
        status, file = accept_model(tmp_path, *words)
    *_, line = capsys.readouterr().err.splitlines()
    assert (status, file.exists()) == (1, False)
    assert f"/snapshots/{repository.commit}/model.safetensors" in line


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--images", "/nowhere"], "/nowhere: No such file or directory"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--set", "kv-pages=none"], "kv"),
        (["--html", "/nowhere/page.html"], "/nowhere/page.html: No such file or directory"),
    ],
)
def test_what_cannot_work_is_one_clear_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    status, file = accept_model(tmp_path, *words)
    (line,) = capsys.readouterr().err.splitlines()
    assert status in (1, 2)
    assert complaint in line
    assert not file.exists()


def test_given_pictures_are_compared_too_and_others_are_refused(tmp_path: Path):
    (tmp_path / "note.txt").write_text("no picture")
    (tmp_path / "street.png").write_bytes(list(scenes())[2].data)
    (given,) = accept._given_pictures(tmp_path)
    assert given.name == "given-street.png"
    assert given.data.startswith(b"\x89PNG")
    assert {call["skill"] for call in given.calls} == {"query", "caption", "point", "detect", "segment", "gaze"}
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(accept.ConfigurationError, match=r"broken\.jpg is no image"):
        list(accept._given_pictures(tmp_path))
