"""Detection: the scores are those of pycocotools, and so is what intervals are computed from."""

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from kestrel_grpc.evaluation.detection import _IN_STATS, _Precisions, evaluate_boxes, open_detection
from kestrel_grpc.evaluation.tasks import Answer
from tests.evaluation import sets


def by_hand(instances_file: Path, detections: list[dict[str, Any]], folder: Path) -> list[float]:
    """The statistics of pycocotools, called as its users do."""
    results = folder / "results.json"
    results.write_text(json.dumps(detections))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(instances_file))
        coco_eval = COCOeval(truth, truth.loadRes(str(results)), "bbox")
        coco_eval.evaluate()
        coco_eval.accumulate()
        coco_eval.summarize()
    return [float(value) for value in coco_eval.stats]


def drawn_set(num_pictures: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Objects of three categories and all sizes, detections near them, false ones and crowds among them."""
    rng = random.Random(5)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for image_id in range(1, num_pictures + 1):
        images.append({"id": image_id, "file_name": f"{image_id}.jpg", "width": 640, "height": 480})
        for _ in range(rng.randrange(6)):
            width, height = rng.choice([(20, 20), (60, 50), (200, 150)])
            box = [rng.uniform(0, 640 - width), rng.uniform(0, 480 - height), width, height]
            category = rng.randrange(1, 4)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category,
                    "bbox": box,
                    "area": width * height,
                    "iscrowd": int(rng.random() < 0.1),
                    "segmentation": [],
                }
            )
            for _ in range(rng.randrange(3)):
                moved = [side + rng.gauss(0, width / 10) for side in box]
                found = category if rng.random() < 0.8 else 1
                detections.append(
                    {
                        "image_id": image_id,
                        "category_id": found,
                        "bbox": moved,
                        "score": rng.choice([0.3, 0.6, 1.0]),
                    }
                )
    categories = [{"id": number, "name": f"kind {number}"} for number in range(1, 5)]
    return {"images": images, "annotations": annotations, "categories": categories}, detections


def test_equal_weights_give_the_scores_of_pycocotools():
    instances, detections = drawn_set(30)
    coco_eval = evaluate_boxes(instances, detections, range(1, 31))
    computed = _Precisions.of(coco_eval).scores(np.ones(30))
    assert min(computed) > 0.05
    assert computed == pytest.approx([float(coco_eval.stats[place]) for place in _IN_STATS], abs=1e-9)


def test_a_resample_of_some_pictures_is_scored_like_these_pictures():
    instances, detections = drawn_set(30)
    kept = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    weights = np.zeros(30)
    weights[np.asarray(kept) - 1] = 1.0
    computed = _Precisions.of(evaluate_boxes(instances, detections, range(1, 31))).scores(weights)
    alone = evaluate_boxes(instances, detections, kept)
    assert computed == pytest.approx([float(alone.stats[place]) for place in _IN_STATS], abs=1e-9)


def test_scores_are_those_of_pycocotools_called_by_hand(tmp_path: Path):
    folder = sets.coco(tmp_path / "coco")
    task = open_detection(folder)
    found = {
        ("one", "circle"): ((0.13, 0.17, 0.37, 0.5), (0.6, 0.1, 0.9, 0.3)),
        ("one", "square"): ((0.58, 0.42, 0.83, 0.75),),
        ("two", "circle"): ((0.1, 0.5, 0.3, 0.8),),
        ("three", "circle"): ((0.62, 0.11, 0.88, 0.46),),
    }
    images: list[tuple[Any, str]] = [(call.image, call.text) for call in task.calls()]
    answers = [Answer(boxes=found.get((file.stem, text), ())) for file, text in images]
    report = task.report(answers)
    stats = by_hand(folder / "annotations" / "instances_val2017.json", report.further["detections"], tmp_path)
    values = {score.name: score.value for score in report.scores}
    names = {"AP": 0, "AP50": 1, "AP75": 2, "AP large": 5, "AR100": 8}
    assert values == {name: stats[place] for name, place in names.items()} | {"AP medium": stats[4]}
    assert 0.0 < values["AP"] < 1.0
    assert all(score.interval is not None for score in report.scores)
    cases = {case.name: (case.answered, case.score) for case in report.cases}
    assert cases == {
        "one.jpg": ("2 right, 1 false, 0 missed", 4 / 5),
        "two.jpg": ("0 right, 1 false, 1 missed", 0.0),
        "three.jpg": ("1 right, 0 false, 1 missed", 2 / 3),
    }


def test_scores_rank_boxes_and_are_compared_with_the_share_of_right_ones(tmp_path: Path):
    task = open_detection(sets.coco(tmp_path))
    truths = {
        (call.image, call.text): [label.box for label in case.truth if label.name == call.text and label.box]
        for case in task.report([Answer()] * len(task.calls())).cases
        for call in task.calls()
        if call.image == case.image
    }
    wrong = (0.9, 0.9, 0.99, 0.99)
    # A false box comes first in each answer, with a lower score.
    right = [tuple(truths[call.image, call.text]) for call in task.calls()]
    ranked = [Answer(boxes=(wrong, *boxes), scores=(0.25, *[0.95] * len(boxes))) for boxes in right]
    report = task.report(ranked)
    values = {score.name: score.value for score in report.scores}
    assert values["AP"] == pytest.approx(1.0)
    assert values["AP unranked"] < 0.8
    num_right, num_wrong = sum(map(len, right)), len(right)
    error = (0.05 * num_right + 0.25 * num_wrong) / (num_right + num_wrong)
    assert values["calibration error"] == pytest.approx(error)
    low, high = report.further["calibration"]
    assert (low["from"], low["boxes"], low["share_right"]) == (0.2, num_wrong, 0.0)
    assert (high["to"], high["boxes"], high["mean_score"], high["share_right"]) == (1.0, num_right, 0.95, 1.0)
    assert [row[1] for row in report.table] == ["boxes", str(num_wrong), str(num_right)]
    unscored = task.report([Answer(boxes=answer.boxes) for answer in ranked])
    assert "calibration" not in unscored.further
    assert {score.name: score.value for score in unscored.scores}["AP"] == values["AP unranked"]


def test_no_boxes_at_all_score_nothing(tmp_path: Path):
    task = open_detection(sets.coco(tmp_path))
    report = task.report([Answer(error="is gone") for _ in task.calls()])
    assert {score.value for score in report.scores} == {0.0}
    assert [case.error for case in report.cases] == ["is gone"] * 3


def test_categories_that_are_present_are_fewer_calls(tmp_path: Path):
    folder = sets.coco(tmp_path)
    assert len(open_detection(folder).calls()) == 6
    present = open_detection(folder, categories="present")
    names = [call.text for call in present.calls()]
    assert names == ["circle", "square", "square", "circle"]
    assert "not comparable" in present.asks
    assert len(open_detection(folder, limit=2).calls()) == 4
