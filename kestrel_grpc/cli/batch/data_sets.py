"""Writes the boxes of a complete batch over a folder of pictures as a data set: in COCO's form and in that of YOLO.

Boxes of the answers are fractions of the picture as the server turns it upright; sizes and pixels here are those of
this picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

_Box = Mapping[str, float]
_ORIENTATION = 0x0112
"""The tag of EXIF for the turn of a picture."""
_TURNED_BY_A_QUARTER = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class Labels:
    """The boxes of one picture by the objects that were looked for.

    `path` is that of the picture in the folder, and `name` the same as the answer has it.
    """

    path: str
    name: str
    width_px: int
    height_px: int
    boxes: Mapping[str, Sequence[_Box]]


@dataclass(slots=True)
class DataSet:
    """Reads the lines of a batch. `wanted` are the objects in the order of the request: the classes.

    `pictures` has the path in `folder` of the picture of each line.
    """

    folder: Path
    pictures: Sequence[str]
    wanted: Sequence[str]
    num_left_out: int = 0
    """The pictures read so far that have no answer for one of the objects, or cannot be read."""

    def labels(self, lines: Path) -> Iterator[Labels]:
        """Yields the boxes of each picture that has an answer for every object. Raises OSError."""
        with lines.open("rb") as file:
            for path, line in zip(self.pictures, file, strict=True):
                document = json.loads(line)
                boxes = self._boxes(document)
                size = None if boxes is None else _upright_size(self.folder / path)
                if boxes is None or size is None:
                    self.num_left_out += 1
                    continue
                yield Labels(path, str(document["id"]), *size, boxes)

    def _boxes(self, document: Mapping[str, Any]) -> Mapping[str, Sequence[_Box]] | None:
        groups = document.get("groups") or [{"object": self.wanted[0], **document}]
        if any("objects" not in group for group in groups):
            return None
        return {str(group["object"]): group["objects"] for group in groups}


def write_coco(target: Path, data_set: DataSet, lines: Path) -> None:
    """Writes one JSON file with images, annotations and categories, as COCO's annotations of instances. Raises
    OSError."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for labels in data_set.labels(lines):
        number = len(images) + 1
        size = {"width": labels.width_px, "height": labels.height_px}
        images.append({"id": number, "file_name": labels.name, **size})
        for category, name in enumerate(data_set.wanted, 1):
            for box in labels.boxes.get(name, ()):
                left, top = box["x_min"] * labels.width_px, box["y_min"] * labels.height_px
                width = (box["x_max"] - box["x_min"]) * labels.width_px
                height = (box["y_max"] - box["y_min"]) * labels.height_px
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": category,
                        "bbox": [round(value, 2) for value in (left, top, width, height)],
                        "area": round(width * height, 2),
                        "iscrowd": 0,
                        **({"score": box["score"]} if "score" in box else {}),
                    }
                )
    categories = [{"id": number, "name": name} for number, name in enumerate(data_set.wanted, 1)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    target.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")


def write_yolo(target: Path, data_set: DataSet, lines: Path) -> None:
    """Writes `labels/` with a text file for each picture, and `data.yaml` with the classes. Raises OSError.

    A line of a text file is a class from 0, and centre, width and height of a box in fractions. Files of an earlier
    run about pictures that are left out now are removed.
    """
    for path in data_set.pictures:
        _labels_file(target, path).unlink(missing_ok=True)
    for labels in data_set.labels(lines):
        file = _labels_file(target, labels.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = (
            f"{index} {_yolo_numbers(box)}\n"
            for index, name in enumerate(data_set.wanted)
            for box in labels.boxes.get(name, ())
        )
        file.write_text("".join(rows), encoding="utf-8")
    # A text of JSON is one of YAML, too.
    names = "".join(f"  {index}: {json.dumps(name)}\n" for index, name in enumerate(data_set.wanted))
    target.mkdir(parents=True, exist_ok=True)
    (target / "data.yaml").write_text(f"train: images\nval: images\nnames:\n{names}", encoding="utf-8")


def with_same_labels(pictures: Iterable[str]) -> tuple[str, str] | None:
    """Returns two pictures that YOLO cannot distinguish, since only their suffixes differ; or None."""
    seen: dict[Path, str] = {}
    for path in pictures:
        other = seen.setdefault(_labels_file(Path(), path), path)
        if other != path:
            return other, path
    return None


def _labels_file(target: Path, picture: str) -> Path:
    return target / "labels" / Path(picture).with_suffix(".txt")


def _yolo_numbers(box: _Box) -> str:
    centre = ((box["x_min"] + box["x_max"]) / 2, (box["y_min"] + box["y_max"]) / 2)
    size = (box["x_max"] - box["x_min"], box["y_max"] - box["y_min"])
    return " ".join(f"{number:.6f}" for number in (*centre, *size))


def _upright_size(path: Path) -> tuple[int, int] | None:
    """Returns width and height of a picture as the server sees it; None if it cannot be read."""
    try:
        with Image.open(path) as image:
            if image.format == "PNG":
                image.load()  # its metadata may come behind its pixels
            # Pillow's `getexif` would take an orientation from XMP, too. The size of a TIFF is upright already.
            turn = _orientation(image.info.get("exif", b""))
            width, height = image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (height, width) if turn in _TURNED_BY_A_QUARTER else (width, height)


def _orientation(metadata: bytes) -> int | None:
    exif = Image.Exif()
    try:
        exif.load(metadata)
        return exif.get(_ORIENTATION)
    except Exception:  # the pixels are valid although the metadata is not
        return None
