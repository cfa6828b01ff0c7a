"""The command frames against a canned server, and images that follow each other in a pipe."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from kestrel_grpc.__main__ import main
from kestrel_grpc.cli.frames import split_images
from tests.client.canned import CannedVision


def pictures() -> list[bytes]:
    """Files with restarts, a thumbnail, and bytes in their data that look like markers."""
    noise = Image.effect_noise((65, 43), 90.0).convert("RGB")
    found: list[bytes] = []
    thumbnail = io.BytesIO()
    noise.save(thumbnail, "JPEG")
    exif = b"Exif\0\0" + thumbnail.getvalue()
    kinds = (("JPEG", {"exif": exif}), ("PNG", {}), ("JPEG", {"progressive": True, "quality": 99}), ("PNG", {}))
    for format, options in kinds:
        file = io.BytesIO()
        noise.save(file, format, **options)
        found.append(file.getvalue())
    return found


PICTURES = pictures()


class Slow(io.BytesIO):
    """A pipe that gives a few bytes at a time."""

    def read1(self, size: int | None = -1) -> bytes:
        return super().read1(min(7, size or 7))


def test_images_in_a_pipe_are_divided_where_each_ends():
    assert list(split_images(io.BytesIO(b"".join(PICTURES)))) == PICTURES
    assert list(split_images(Slow(b"".join(PICTURES)))) == PICTURES
    assert list(split_images(io.BytesIO())) == []


def test_what_fills_the_space_between_images_of_a_pipe_is_skipped():
    padded = b"\n".join(picture + bytes(70_000) for picture in PICTURES)
    assert list(split_images(io.BytesIO(padded))) == PICTURES
    assert list(split_images(Slow(padded))) == PICTURES


CUT_OFF = (PICTURES[0][:-1], PICTURES[1][:-3], b"\xff\xd8\xff\xe0\0\0", b"\xff")


@pytest.mark.parametrize("data", [b"GIF89a", *CUT_OFF])
def test_a_pipe_without_images_is_refused_in_one_line(data: bytes):
    with pytest.raises(ValueError, match="stdin"):
        list(split_images(io.BytesIO(data)))


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_frame_of_a_folder_has_a_line(
    address: str, vision: CannedVision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for number, data in enumerate(PICTURES):
        (tmp_path / f"{number}.png").write_bytes(data)
    assert main(["frames", str(tmp_path), "car", "--track", "--max-objects", "7", "--address", address]) == 0
    found = lines(capsys)
    assert [line["frame"] for line in found] == [0, 1, 2, 3]
    assert found[1]["name"] == str(tmp_path / "1.png")
    assert found[0]["objects"] == [
        {"box": {"x_min": 0.25, "y_min": 0.125, "x_max": 0.75, "y_max": 0.5}, "score": None, "track_id": 1}
    ]
    (asked,) = (request.settings for request in vision.requests)
    assert (asked.request.object, asked.request.max_objects, asked.every_frame, asked.track) == (
        "car",
        7,
        True,
        True,
    )


def test_frames_from_a_pipe_are_looked_at_as_of_a_camera_where_asked_for(
    address: str, vision: CannedVision, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"".join(PICTURES))))
    assert main(["frames", "-", "car", "--points", "--live", "--address", address]) == 0
    assert {line["name"] for line in lines(capsys)} == {"-"}
    assert not vision.requests[0].settings.every_frame


def test_what_excludes_each_other_is_refused(address: str, capsys: pytest.CaptureFixture[str]):
    assert main(["frames", "-", "car", "--points", "--track", "--address", address]) == 1
    assert "--points" in capsys.readouterr().err
