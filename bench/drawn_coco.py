"""Writes scenes that the built-in model was never trained on as a set for `kestrel-grpc evaluate coco`.

Categories are the eight shapes; printed texts are no objects. Needs the extra `training`. Run as
`python -m bench.drawn_coco FOLDER`, then `kestrel-grpc evaluate coco FOLDER` asks a server about the set.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kestrel_grpc.evaluation.detection import DEFAULT_SPLIT
from training.drawing import encode_scene
from training.scenes import HELD_OUT_SEED, make_scene
from training.shapes import SHAPES

_FIRST_SEED = HELD_OUT_SEED + 500_000
"""Scenes of `bench.quality` have other seeds."""


def write_set(folder: Path, num_scenes: int) -> None:
    """Writes the pictures and their boxes in the layout of COCO. Raises OSError."""
    pictures, annotations = folder / DEFAULT_SPLIT, folder / "annotations"
    for place in (pictures, annotations):
        place.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []
    for number in range(1, num_scenes + 1):
        scene = make_scene(_FIRST_SEED + number)
        name = f"{number:06}.png"
        (pictures / name).write_bytes(encode_scene(scene))
        images.append({"id": number, "file_name": name, "width": scene.width_px, "height": scene.height_px})
        for shape in scene.shapes:
            left, top, right, bottom = shape.box
            width, height = (right - left) * scene.width_px, (bottom - top) * scene.height_px
            boxes.append(
                {
                    "id": len(boxes) + 1,
                    "image_id": number,
                    "category_id": 1 + SHAPES.index(shape.name),
                    "bbox": [left * scene.width_px, top * scene.height_px, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                    "segmentation": [],
                }
            )
    categories = [{"id": number, "name": name} for number, name in enumerate(SHAPES, 1)]
    content = {"images": images, "annotations": boxes, "categories": categories}
    (annotations / f"instances_{DEFAULT_SPLIT}.json").write_text(json.dumps(content), encoding="utf-8")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.drawn_coco", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the set is written")
    parser.add_argument("--scenes", type=int, default=400, help="pictures (%(default)s)")
    arguments = parser.parse_args()
    write_set(arguments.folder, arguments.scenes)


if __name__ == "__main__":
    main()
