#!/bin/sh
# pycocotools 2.0.11 raises IndexError where a model found nothing in any picture: `COCO.loadRes` looks at the first
# detection to learn their kind. A precision of 0, the right result, cannot be computed by its evaluation.
#
# Seen: "no detections: IndexError", "one detection: 1 loaded".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pycocotools==2.0.11 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import contextlib
import io
import sys

from pycocotools.coco import COCO

with contextlib.redirect_stdout(io.StringIO()):
    truth = COCO()
    truth.dataset = {
        "images": [{"id": 1, "height": 40, "width": 30}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0}],
    }
    truth.createIndex()
    found = truth.loadRes([{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}])
    try:
        truth.loadRes([])
        nothing = "loaded"
    except IndexError:
        nothing = "IndexError"
print(f"pycocotools 2.0.11\nno detections: {nothing}\none detection: {len(found.getAnnIds())} loaded")
sys.exit(not (nothing == "IndexError" and len(found.getAnnIds()) == 1))
PYTHON
