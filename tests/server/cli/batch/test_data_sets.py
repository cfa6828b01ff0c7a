"""Boxes of a batch as data sets of COCO and of YOLO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kestrel_grpc.cli.batch.data_sets import DataSet, write_coco, write_yolo
from kestrel_grpc.cli.commands import run


def box(x_min: float, y_min: float, x_max: float, y_max: float) -> dict[str, float]:
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


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


def test_boxes_are_annotations_of_coco_in_pixels_of_upright_pictures(
    folder: Path, lines: Path, tmp_path: Path
) -> None:
    data_set = DataSet(folder, ["car", "dog"])
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


def test_annotations_of_coco_have_the_scores_of_boxes(folder: Path, tmp_path: Path) -> None:
    lines = tmp_path / "out.jsonl"
    boxes = [{**box(0.25, 0.5, 0.75, 1.0), "score": 0.75}, box(0.0, 0.0, 0.5, 0.5)]
    lines.write_text(json.dumps({"id": "a.png", "objects": boxes}) + "\n")
    write_coco(tmp_path / "coco.json", DataSet(folder, ["car"]), lines)
    scored, plain = json.loads((tmp_path / "coco.json").read_text())["annotations"]
    assert scored["score"] == 0.75
    assert "score" not in plain


def test_boxes_are_lines_of_yolo_in_fractions(folder: Path, lines: Path, tmp_path: Path) -> None:
    write_yolo(tmp_path / "yolo", DataSet(folder, ["car", "dog"]), lines)
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


def test_answers_about_one_object_have_one_class(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(json.dumps({"id": "a.png", "objects": [box(0.0, 0.0, 0.5, 0.5)]}) + "\n")
    write_coco(tmp_path / "coco.json", DataSet(folder, ["car"]), file)
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
) -> None:
    names = {"FOLDER": str(folder), "FILE": str(lines), "out.jsonl": str(tmp_path / "answers.jsonl")}
    given = [names.get(word, word) for word in words]
    assert run(["batch", *given, "--coco", str(tmp_path / "coco.json"), "--address", "http://127.0.0.1:1"]) == 2
    assert f"kestrel-grpc: --coco: {complaint}" in capsys.readouterr().err
