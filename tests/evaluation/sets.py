"""Tiny sets of drawn shapes in the layouts of the published ones. The built-in model knows these shapes."""

import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

Shape = tuple[str, str, tuple[int, int, int, int]]
"""Name, color, and left, top, right and bottom in pixels."""
SIZE = (480, 360)
PICTURES: dict[str, Sequence[Shape]] = {
    "one": [("circle", "red", (60, 60, 180, 180)), ("square", "blue", (280, 150, 400, 270))],
    "two": [("square", "green", (60, 180, 150, 270))],
    "three": [("circle", "yellow", (300, 40, 420, 160)), ("circle", "black", (60, 200, 160, 300))],
}


def picture(name: str) -> Image.Image:
    image = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(image)
    for shape, color, box in PICTURES[name]:
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=color)
    return image


def picture_bytes(name: str) -> bytes:
    data = io.BytesIO()
    picture(name).save(data, "PNG")
    return data.getvalue()


def write_pictures(folder: Path, ending: str) -> Path:
    folder.mkdir(parents=True)
    for name in PICTURES:
        picture(name).save(folder / f"{name}{ending}")
    return folder


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def chartqa(folder: Path) -> Path:
    """Three questions, the last of which has a wrong truth, so that one answer is counted as wrong."""
    write_pictures(folder / "test" / "png", ".png")
    human = [
        {"imgname": "one.png", "query": "What color is the circle?", "label": "Red"},
        {"imgname": "two.png", "query": "What color is the square?", "label": "green"},
    ]
    augmented = [{"imgname": "one.png", "query": "What color is the square?", "label": "pink <b>&"}]
    write_json(folder / "test" / "test_human.json", human)
    write_json(folder / "test" / "test_augmented.json", augmented)
    return folder


def textvqa(folder: Path) -> Path:
    """A question of which three of ten people gave another answer, so that the expected one is fully right."""
    write_pictures(folder / "train_images", ".jpg")
    answers = ["the red"] * 7 + ["pink"] * 3
    entry = {"question_id": 7, "image_id": "one", "question": "What color is the circle?", "answers": answers}
    write_json(folder / "TextVQA_0.5.1_val.json", {"dataset_type": "val", "data": [entry]})
    return folder


def docvqa(folder: Path) -> Path:
    write_pictures(folder / "spdocvqa_images", ".png")
    entries = [
        {
            "questionId": 1,
            "question": "What color is the square?",
            "image": "documents/two.png",
            "answers": ["nothing", "Greem"],
        }
    ]
    write_json(folder / "spdocvqa_qas" / "val_v1.0_withQT.json", {"dataset_split": "val", "data": entries})
    return folder


def instances(*, with_outlines: bool = False) -> dict[str, Any]:
    """The shapes as objects of COCO."""
    categories = [{"id": 3, "name": "circle"}, {"id": 5, "name": "square"}]
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (name, shapes) in enumerate(PICTURES.items(), 11):
        images.append({"id": number, "file_name": f"{name}.jpg", "width": SIZE[0], "height": SIZE[1]})
        for shape, _, (left, top, right, bottom) in shapes:
            outline = [left, top, right, top, right, bottom, left, bottom]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": 3 if shape == "circle" else 5,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": 0,
                    "segmentation": [outline] if with_outlines else [],
                }
            )
    return {"images": images, "annotations": annotations, "categories": categories}


def coco(folder: Path) -> Path:
    write_pictures(folder / "val2017", ".jpg")
    write_json(folder / "annotations" / "instances_val2017.json", instances())
    return folder


def refcoco(folder: Path) -> Path:
    """Two expressions about one object, and one about another, whose outline is elsewhere than its box."""
    write_pictures(folder.parent / "train2014", ".jpg")
    content = instances(with_outlines=True)
    content["annotations"][2]["segmentation"] = [[0, 0, 5, 0, 5, 5]]
    write_json(folder / "instances.json", content)
    refs = [
        ref(1, 11, ["red circle", "circle"]),
        ref(3, 12, ["green square"]),
        {**ref(2, 11, ["blue square"]), "split": "testA"},
    ]
    with (folder / "refs(unc).p").open("wb") as file:
        pickle.dump(refs, file, protocol=2)
    return folder


def ref(ann_id: int, image_id: int, sentences: Sequence[str]) -> dict[str, Any]:
    return {
        "ref_id": ann_id,
        "ann_id": ann_id,
        "image_id": image_id,
        "split": "val",
        "file_name": f"COCO_train2014_{image_id}_{ann_id}.jpg",
        "sentences": [
            {"sent_id": 100 * ann_id + number, "sent": text, "raw": text, "tokens": text.split()}
            for number, text in enumerate(sentences)
        ],
    }
