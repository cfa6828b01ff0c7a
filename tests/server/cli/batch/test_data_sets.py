"""Boxes of a batch as data sets of COCO and of YOLO."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kestrel_grpc.cli.batch.data_sets import DataSet, write_coco, write_yolo
from kestrel_grpc.cli.commands import run
from kestrel_runtime.imaging.decoding import decode_image


def box(x_min: float, y_min: float, x_max: float, y_max: float) -> dict[str, float]:
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


PICTURES = ("a.png", "below/b.png", "c.jpg", "a.png", "none.png", "c.jpg")
"""The pictures of the lines."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures: one below a folder, and one that is shown turned by a quarter."""
    pictures = tmp_path / "pictures"
    (pictures / "below").mkdir(parents=True)
    Image.new("RGB", (40, 20)).save(pictures / "a.png")
    Image.new("RGB", (30, 50)).save(pictures / "below" / "b.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (30, 10)).save(pictures / "c.jpg", exif=turned)
    return pictures


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Answers about two objects: one of them failed, one lacks an object, and one is about no picture."""
    car, dog = {"object": "car", "objects": [box(0.25, 0.5, 0.75, 1.0)]}, {"object": "dog", "objects": []}
    failed: Any = {"object": "dog", "error": {"code": "QUEUE_TIMEOUT"}}
    answers: list[Any] = [
        {"id": "a.png", "groups": [car, dog]},
        {"id": "below/b.png", "groups": [car, {**dog, "objects": [box(0.0, 0.0, 0.1, 0.2), box(0.5, 0.5, 1, 1)]}]},
        {"id": "c.jpg", "groups": [dog | {"object": "car"}, {**car, "object": "dog"}]},
        {"id": "a.png", "groups": [car, failed]},
        {"id": "none.png", "groups": [car, dog]},
        {"id": "c.jpg", "error": {"code": "INVALID_IMAGE"}},
    ]
    file = tmp_path / "out.jsonl"
    file.write_text("".join(f"{json.dumps(answer)}\n" for answer in answers))
    return file


def test_boxes_are_annotations_of_coco_in_pixels_of_upright_pictures(folder: Path, lines: Path, tmp_path: Path):
    data_set = DataSet(folder, PICTURES, ["car", "dog"])
    write_coco(tmp_path / "coco.json", data_set, lines)
    written = json.loads((tmp_path / "coco.json").read_text())
    assert [(item["file_name"], item["width"], item["height"]) for item in written["images"]] == [
        ("a.png", 40, 20),
        ("below/b.png", 30, 50),
        ("c.jpg", 10, 30),
    ]
    assert written["categories"] == [{"id": 1, "name": "car"}, {"id": 2, "name": "dog"}]
    assert [(item["image_id"], item["category_id"], item["bbox"]) for item in written["annotations"]] == [
        (1, 1, [10.0, 10.0, 20.0, 10.0]),
        (2, 1, [7.5, 25.0, 15.0, 25.0]),
        (2, 2, [0.0, 0.0, 3.0, 10.0]),
        (2, 2, [15.0, 25.0, 15.0, 25.0]),
        (3, 2, [2.5, 15.0, 5.0, 15.0]),
    ]
    assert [item["id"] for item in written["annotations"]] == [1, 2, 3, 4, 5]
    assert written["annotations"][0]["area"] == 200.0
    assert data_set.num_left_out == 3


def test_annotations_of_coco_have_the_scores_of_boxes(folder: Path, tmp_path: Path):
    lines = tmp_path / "out.jsonl"
    boxes = [{**box(0.25, 0.5, 0.75, 1.0), "score": 0.75}, box(0.0, 0.0, 0.5, 0.5)]
    lines.write_text(json.dumps({"id": "a.png", "objects": boxes}) + "\n")
    write_coco(tmp_path / "coco.json", DataSet(folder, ["a.png"], ["car"]), lines)
    scored, plain = json.loads((tmp_path / "coco.json").read_text())["annotations"]
    assert scored["score"] == 0.75
    assert "score" not in plain


def test_boxes_are_lines_of_yolo_in_fractions(folder: Path, lines: Path, tmp_path: Path):
    write_yolo(tmp_path / "yolo", DataSet(folder, PICTURES, ["car", "dog"]), lines)
    labels = tmp_path / "yolo" / "labels"
    assert sorted(str(file.relative_to(labels)) for file in labels.rglob("*.txt")) == [
        "a.txt",
        "below/b.txt",
        "c.txt",
    ]
    assert (labels / "a.txt").read_text() == "0 0.500000 0.750000 0.500000 0.500000\n"
    assert (labels / "below" / "b.txt").read_text().splitlines()[1:] == [
        "1 0.050000 0.100000 0.100000 0.200000",
        "1 0.750000 0.750000 0.500000 0.500000",
    ]
    assert (tmp_path / "yolo" / "data.yaml").read_text() == (
        'train: images\nval: images\nnames:\n  0: "car"\n  1: "dog"\n'
    )


def test_answers_about_one_object_have_one_class(folder: Path, tmp_path: Path):
    file = tmp_path / "out.jsonl"
    file.write_text(json.dumps({"id": "a.png", "objects": [box(0.0, 0.0, 0.5, 0.5)]}) + "\n")
    write_coco(tmp_path / "coco.json", DataSet(folder, ["a.png"], ["car"]), file)
    written = json.loads((tmp_path / "coco.json").read_text())
    assert [(item["category_id"], item["bbox"]) for item in written["annotations"]] == [(1, [0.0, 0.0, 20.0, 10.0])]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["FILE", "out.jsonl", "--skill", "detect", "--field", "object=car"], "IN must be a folder of pictures"),
        (["FOLDER", "out.jsonl", "--skill", "detect"], "needs --skill detect, and --field object=… or objects=[…]"),
        (["FOLDER", "out.jsonl", "--skill", "point", "--field", "object=car"], "needs --skill detect"),
        (["FOLDER", "-", "--skill", "detect", "--field", "object=car"], "OUT must be a file, which is read again"),
    ],
)
def test_what_makes_no_data_set_is_refused_before_anything_is_asked(
    words: list[str], complaint: str, folder: Path, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    names = {"FOLDER": str(folder), "FILE": str(lines), "out.jsonl": str(tmp_path / "answers.jsonl")}
    given = [names.get(word, word) for word in words]
    assert run(["batch", *given, "--coco", str(tmp_path / "coco.json"), "--address", "http://127.0.0.1:1"]) == 2
    assert f"kestrel-grpc: --coco: {complaint}" in capsys.readouterr().err


def test_sizes_are_those_of_pictures_as_the_server_turns_them(tmp_path: Path):
    """A TIFF has an orientation of its own, one in XMP is not applied, and a PNG may have it behind its pixels."""
    turned = Image.Exif()
    turned[0x0112] = 6
    picture = Image.new("RGB", (30, 10))
    for suffix in ("tif", "webp", "png"):
        picture.save(tmp_path / f"turned.{suffix}", exif=turned)
    whole = (tmp_path / "turned.png").read_bytes()
    start = whole.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(whole[start : start + 4], "big")
    last = whole.index(b"IEND") - 4
    (tmp_path / "behind.png").write_bytes(whole[:start] + whole[end:last] + whole[start:end] + whole[last:])
    words = 'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"'
    picture.save(tmp_path / "xmp.jpg", xmp=f"<x:xmpmeta {words}/>".encode())
    picture.save(tmp_path / "damaged.jpg", exif=b"Exif\0\0nothing")
    sizes = {}
    for name in ("turned.tif", "turned.webp", "turned.png", "behind.png", "xmp.jpg", "damaged.jpg"):
        lines = tmp_path / "out.jsonl"
        lines.write_text(json.dumps({"id": name, "objects": []}) + "\n")
        (labels,) = DataSet(tmp_path, [name], ["car"]).labels(lines)
        sizes[name] = labels.width_px, labels.height_px
        decoded = decode_image((tmp_path / name).read_bytes(), max_image_pixels=10_000)
        assert sizes[name] == decoded.size, name
    assert len(set(sizes.values())) == 2


def test_names_that_are_not_utf_8_have_their_boxes(folder: Path, tmp_path: Path):
    name = os.fsdecode(b"b\xe9.png")
    (folder / "a.png").rename(folder / name)
    lines = tmp_path / "out.jsonl"
    lines.write_text(json.dumps({"id": "b\\xe9.png", "objects": [box(0.0, 0.0, 0.5, 0.5)]}) + "\n")
    data_set = DataSet(folder, [name], ["car"])
    write_coco(tmp_path / "coco.json", data_set, lines)
    write_yolo(tmp_path / "yolo", data_set, lines)
    assert data_set.num_left_out == 0
    assert json.loads((tmp_path / "coco.json").read_text())["images"][0]["file_name"] == "b\\xe9.png"
    assert os.fsencode(next((tmp_path / "yolo" / "labels").iterdir()).name) == b"b\xe9.txt"


def test_labels_of_an_earlier_run_go_with_their_picture(folder: Path, lines: Path, tmp_path: Path):
    old = tmp_path / "yolo" / "labels" / "none.txt"
    old.parent.mkdir(parents=True)
    old.write_text("7 0.5 0.5 1 1\n")
    write_yolo(tmp_path / "yolo", DataSet(folder, PICTURES, ["car", "dog"]), lines)
    assert not old.exists()
    assert (old.parent / "a.txt").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--coco", "answers.jsonl"], "is a file of OUT"),
        (["--coco", "answers.jsonl.resume"], "is a file of OUT"),
        (["--coco", "pictures"], "cannot be written"),
        (["--coco", "none/coco.json"], "is no folder"),
        (["--yolo", "out.jsonl"], "is no folder that can be written to"),
        (["--yolo", "out.jsonl/yolo"], "is no folder that can be written to"),
    ],
)
def test_data_sets_that_cannot_be_written_are_refused_before_anything_is_asked(
    words: list[str], complaint: str, folder: Path, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flag, name = words
    asked = ["batch", str(folder), str(tmp_path / "answers.jsonl"), "--skill", "detect", "--field", "object=car"]
    assert run([*asked, flag, str(tmp_path / name), "--address", "http://127.0.0.1:1"]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


def test_pictures_that_differ_in_their_suffix_alone_make_no_labels_of_yolo(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "a.jpg").write_bytes((folder / "c.jpg").read_bytes())
    asked = ["batch", str(folder), str(tmp_path / "answers.jsonl"), "--skill", "detect", "--field", "object=car"]
    assert run([*asked, "--yolo", str(tmp_path / "yolo"), "--address", "http://127.0.0.1:1"]) == 2
    assert "a.jpg and a.png would have the same file of labels" in capsys.readouterr().err
