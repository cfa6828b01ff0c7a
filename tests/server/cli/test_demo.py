"""The demo as a new user runs it: correct answers on stdout, and a picture with the objects found."""

import errno
from importlib.resources import files
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from kestrel_grpc.__main__ import main
from kestrel_grpc.cli import demo


def test_the_demo_answers_truly_and_draws_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "demo.png"
    assert main(["demo", "--draw", str(target)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    answers = {
        line.split(maxsplit=1)[1]: lines[place + 1] for place, line in enumerate(lines) if line[:5] == "query"
    }
    assert answers == {
        "How many shapes are there?": "5",
        "What color is the star?": "yellow",
        "What does the text say?": "KITE",
        "Is there a heart?": "No",
        "What color is the star? (adapter gold)": "gold",
    }
    caption = lines[lines.index("caption") + 1]
    for thing in ("red circle", "blue square", "green triangle", "yellow star", "purple ring", "KITE"):
        assert thing in caption
    assert len(lines[lines.index("point    shape") + 1].split("  ")) == 5
    with Image.open(target) as drawn, Image.open(str(files("kestrel_grpc") / "demo_picture.png")) as picture:
        assert drawn.size == picture.size
        assert ImageChops.difference(drawn.convert("RGB"), picture.convert("RGB")).getbbox() is not None


def test_a_picture_that_cannot_be_written_is_one_clear_line_before_anything_is_asked(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["demo", "--draw", "/nowhere/demo.png"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "kestrel-grpc: /nowhere/demo.png: No such file or directory\n"


def test_a_demo_that_fails_leaves_no_empty_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def fail(target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "_demonstrate", fail)
    target = tmp_path / "demo.png"
    assert main(["demo", "--draw", str(target)]) == 1
    assert not target.exists()
