"""Scores detection on COCO: average precision of boxes, computed by pycocotools.

Detect takes one kind of object, so each picture is asked about each category by its name. pycocotools ranks the
boxes by their scores. "AP unranked" gives every box the score 1: pycocotools then ranks by picture and by the order
in the answer, which makes average precision close to precision times recall. `Calibration` compares scores with the
share of boxes that are right.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kestrel_grpc.evaluation.intervals import Weights, bootstrap_intervals
from kestrel_grpc.evaluation.questions import read_json
from kestrel_grpc.evaluation.suitability import object_warnings
from kestrel_grpc.evaluation.tasks import (
    Answer,
    BoxSides,
    Call,
    Case,
    Label,
    Report,
    Score,
    SetUnusable,
    find_file,
    sample,
)

DEFAULT_SPLIT = "val2017"
MAX_BOXES = 100
"""The most boxes of a picture and a category that pycocotools counts."""
_NO_SCORE = 1.0
"""The score of every box where one has none, as of a server that makes none."""
_AREAS = ("all", "small", "medium", "large")
_AT_50, _AT_75 = 0, 5  # of the thresholds 0.50, 0.55 … 0.95
_NAMES = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large", "AR100")
_IN_STATS = (0, 1, 2, 3, 4, 5, 8)
"""The index of each of `_NAMES` in `COCOeval.stats`."""
_NUM_INTERVALS = 10
"""The intervals of scores by which calibration is measured."""
_BAR_CHARS = 20
_SHOWN_LABELS = 60

Categories = Literal["all", "present"]
Detections = list[dict[str, Any]]
"""Boxes in the format of COCO's results: image_id, category_id, bbox (left, top, width, height in pixels),
score."""


class DetectionTask:
    """Holds the pictures of one split, and the categories that each picture is asked about."""

    def __init__(
        self,
        source: Path,
        split: str,
        pictures: Path,
        instances: dict[str, Any],
        image_ids: Sequence[int],
        which: Categories,
    ) -> None:
        self.split = split
        self._source = source
        self._instances = instances
        self._which = which
        self._names: dict[int, str] = {item["id"]: item["name"] for item in instances["categories"]}
        self._images: dict[int, dict[str, Any]] = {item["id"]: item for item in instances["images"]}
        self._image_ids = sorted(image_ids)
        self._files = {number: pictures / self._images[number]["file_name"] for number in self._image_ids}
        self._truths: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for item in instances["annotations"]:
            self._truths[item["image_id"]].append(item)
        self._asked = [
            (image_id, category_id) for image_id in self._image_ids for category_id in self._asked_about(image_id)
        ]

    def _asked_about(self, image_id: int) -> list[int]:
        if self._which == "all":
            return sorted(self._names)
        return sorted({item["category_id"] for item in self._truths[image_id]})

    @property
    def source(self) -> str:
        """The file of the annotations."""
        return str(self._source)

    @property
    def asks(self) -> str:
        """The categories that are asked about."""
        if self._which == "all":
            return "Detect is asked for every category of the set in every picture."
        return (
            "Detect is asked for the categories that are in a picture: false boxes of others cannot occur, so "
            "these scores are higher than, and not comparable with, those over all categories."
        )

    def calls(self) -> list[Call]:
        """Returns a call for each picture and category."""
        return [
            Call("detect", self._files[image_id], self._names[category_id], MAX_BOXES)
            for image_id, category_id in self._asked
        ]

    def detections(self, answers: Sequence[Answer]) -> Detections:
        """Returns all boxes of the answers, in the format that pycocotools loads.

        If one has no score, all have the same.
        """
        has_scores = _have_scores(answers)
        return [
            {
                "image_id": image_id,
                "category_id": category_id,
                "bbox": _in_pixels(box, self._images[image_id]),
                "score": score if has_scores else _NO_SCORE,
            }
            for (image_id, category_id), answer in zip(self._asked, answers, strict=True)
            for box, score in zip_longest(answer.boxes, answer.scores)
        ]

    def report(self, answers: Sequence[Answer]) -> Report:
        """Returns the scores of pycocotools, with intervals over pictures. A failed call has no boxes.

        A picture is a case. Its score is F1 at an overlap of 0.5: the harmonic mean of the shares of its boxes that
        are right and of its objects that were found.
        """
        detections = self.detections(answers)
        coco_eval = evaluate_boxes(self._instances, detections, self._image_ids)
        count = len(self._image_ids)
        stats = [float(coco_eval.stats[place]) for place in _IN_STATS]
        intervals = bootstrap_intervals(_Precisions.of(coco_eval).scores, count)
        scores = [
            Score(name, value, interval, count)
            for name, value, interval in zip(_NAMES, stats, intervals, strict=True)
            if value >= 0.0  # pycocotools gives -1 where there is no object of that size
        ]
        further = {"detections": detections, "ap_by_category": self._by_category(coco_eval)}
        table: Sequence[Sequence[str]] = ()
        if detections and _have_scores(answers):
            scores.append(self._unranked(detections))
            calibration = Calibration.of(coco_eval)
            (interval,) = bootstrap_intervals(calibration.errors, count)
            scores.append(Score("calibration error", calibration.error(np.ones(count)), interval, count))
            table, further["calibration"] = calibration.table(), calibration.facts()
        cases = self._cases(coco_eval, answers)
        return Report(scores, cases, further, tuple(object_warnings(answers)), table)

    def _unranked(self, detections: Detections) -> Score:
        """Returns the average precision as if no box had a score."""
        equal = [{**item, "score": _NO_SCORE} for item in detections]
        coco_eval = evaluate_boxes(self._instances, equal, self._image_ids)
        precisions, count = _Precisions.of(coco_eval), len(self._image_ids)
        (interval,) = bootstrap_intervals(lambda weights: precisions.scores(weights)[:1], count)
        return Score("AP unranked", float(coco_eval.stats[0]), interval, count)

    def _by_category(self, coco_eval: Any) -> dict[str, float]:
        # [thresholds, recalls, categories, areas, numbers of boxes]
        precision = coco_eval.eval["precision"][:, :, :, 0, -1]
        means = {
            self._names[number]: float(precision[:, :, place].mean())
            for place, number in enumerate(coco_eval.params.catIds)
        }
        return {name: mean for name, mean in means.items() if mean >= 0.0}

    def _cases(self, coco_eval: Any, answers: Sequence[Answer]) -> list[Case]:
        counts = {number: [0, 0, 0] for number in self._image_ids}
        for entry in coco_eval.evalImgs:
            if entry is None or entry["aRng"] != coco_eval.params.areaRng[0]:
                continue
            is_matched, is_ignored = entry["dtMatches"][_AT_50] > 0, entry["dtIgnore"][_AT_50] > 0
            num_right = int((is_matched & ~is_ignored).sum())
            num_true = int((np.asarray(entry["gtIgnore"]) == 0).sum())
            tally = counts[entry["image_id"]]
            tally[0] += num_right
            tally[1] += int((~is_matched & ~is_ignored).sum())
            tally[2] += num_true - num_right
        found: defaultdict[int, list[Label]] = defaultdict(list)
        errors: dict[int, str] = {}
        for (image_id, category_id), answer in zip(self._asked, answers, strict=True):
            found[image_id] += [Label(self._names[category_id], box=box) for box in answer.boxes]
            if answer.error:
                errors.setdefault(image_id, answer.error)
        return [self._case(number, counts[number], found[number], errors.get(number)) for number in self._image_ids]

    def _case(self, image_id: int, tally: Sequence[int], found: Sequence[Label], error: str | None) -> Case:
        num_right, num_false, num_missed = tally
        image = self._images[image_id]
        truth = [
            Label(self._names[item["category_id"]], box=_in_fractions(item["bbox"], image))
            for item in self._truths[image_id]
            if not item.get("iscrowd")
        ]
        total = 2 * num_right + num_false + num_missed
        return Case(
            str(image["file_name"]),
            str(image_id),
            self._files[image_id],
            "objects of " + ("all categories" if self._which == "all" else "the categories in the picture"),
            f"objects: {num_right + num_missed}",
            f"{num_right} right, {num_false} false, {num_missed} missed",
            2 * num_right / total if total else 1.0,
            error,
            truth[:_SHOWN_LABELS],
            found[:_SHOWN_LABELS],
        )


def open_detection(
    folder: Path,
    *,
    split: str | None = None,
    pictures: Path | None = None,
    limit: int | None = None,
    categories: Categories = "all",
) -> DetectionTask:
    """Reads a split, or a sample of `limit` of its pictures.

    Raises `SetUnusable`, `OSError`, and `ModuleNotFoundError` without pycocotools.
    """
    import pycocotools.cocoeval  # noqa: F401 to fail before the calls where it is missing

    split = DEFAULT_SPLIT if split is None else split
    name = f"instances_{split}.json"
    path = find_file(folder, "annotations of COCO", f"annotations/{name}", name)
    instances = read_json(path)
    place = pictures or folder / split
    if not place.is_dir():
        raise SetUnusable(f"{place}: is no folder of pictures; --pictures names another")
    try:
        image_ids = sample([image["id"] for image in instances["images"]], limit)
        if not image_ids or not instances["categories"]:
            raise SetUnusable(f"{path}: has no pictures or no categories")
        return DetectionTask(path, split, place, instances, image_ids, categories)
    except (KeyError, TypeError) as error:
        raise SetUnusable(f"{path}: an entry is not in the published form ({error!r})") from error


def evaluate_boxes(instances: dict[str, Any], detections: Detections, image_ids: Sequence[int]) -> Any:
    """Returns a `COCOeval` of boxes, accumulated and summarised, over these pictures. It prints nothing."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth: Any = COCO()  # its stubs allow neither data in memory nor results in memory
        found: Any = COCO()
        # pycocotools adds fields to its arguments.
        truth.dataset = copy.deepcopy(instances)
        truth.createIndex()
        if detections:
            found = truth.loadRes(copy.deepcopy(detections))
        else:  # `loadRes` fails without any
            found.dataset = {key: instances[key] for key in ("images", "categories")} | {"annotations": []}
            found.createIndex()
        coco_eval = COCOeval(truth, found, "bbox")
        coco_eval.params.imgIds = list(image_ids)
        coco_eval.evaluate()
        coco_eval.accumulate()
        coco_eval.summarize()
    return coco_eval


@dataclass(frozen=True, slots=True)
class _Matches:
    """Holds the boxes of one category and range of areas as pycocotools has matched them, the highest score
    first."""

    picture: NDArray[np.intp]  # [boxes]
    is_right: NDArray[np.bool_]  # [thresholds, boxes]
    is_false: NDArray[np.bool_]  # [thresholds, boxes]; boxes that are neither are ignored
    num_true: NDArray[np.int64]  # [pictures]

    def curve(self, weights: Weights, recalls: NDArray[np.float64]) -> tuple[Any, Any] | None:
        """Returns the interpolated precision at each recall [thresholds, recalls], and the highest recall
        [thresholds].

        Returns None if the resample has no object.
        """
        num_true = float(weights @ self.num_true)
        if num_true == 0.0:
            return None
        of_box = weights[self.picture]
        right = np.cumsum(self.is_right * of_box, axis=1)
        false = np.cumsum(self.is_false * of_box, axis=1)
        recall = right / num_true
        precision = right / (right + false + np.spacing(1))
        # The best precision at this recall or at a higher recall; 0 beyond the highest recall.
        best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        best = np.concatenate((best, np.zeros((len(best), 1))), axis=1)
        places = (line.searchsorted(recalls) for line in recall)
        highest = recall[:, -1] if recall.shape[1] else np.zeros(len(recall))
        return np.stack([line[place] for line, place in zip(best, places, strict=True)]), highest


@dataclass(frozen=True, slots=True)
class _Precisions:
    """Computes scores for pictures with weights, from the matches of pycocotools, which itself has no weights."""

    recalls: NDArray[np.float64]
    matches: Sequence[Sequence[_Matches]]
    """The matches, by range of areas and category."""

    @classmethod
    def of(cls, coco_eval: Any) -> _Precisions:
        """Returns the matches of an evaluation by pycocotools."""
        params = coco_eval.params
        num_pictures, num_areas = len(params.imgIds), len(params.areaRng)
        # `evalImgs` goes by category, range of areas and picture.
        entries = iter(coco_eval.evalImgs)
        by_area: list[list[_Matches]] = [[] for _ in range(num_areas)]
        for _ in params.catIds:
            for area in by_area:
                area.append(_matches([next(entries) for _ in range(num_pictures)], len(params.iouThrs)))
        return cls(np.asarray(params.recThrs, np.float64), by_area)

    def scores(self, weights: Weights) -> list[float]:
        """Returns the scores of `_NAMES`; NaN if there is no object."""
        found: list[float] = []
        recall = float("nan")
        for area, matches in zip(_AREAS, self.matches, strict=True):
            curves = [curve for item in matches if (curve := item.curve(weights, self.recalls)) is not None]
            if not curves:
                found += [float("nan")] * (3 if area == "all" else 1)
                continue
            precision = np.stack([of_category for of_category, _ in curves])  # [categories, thresholds, recalls]
            found.append(float(precision.mean()))
            if area == "all":
                found += [float(precision[:, at].mean()) for at in (_AT_50, _AT_75)]
                recall = float(np.mean([highest for _, highest in curves]))
        return [*found, recall]


def _matches(entries: Sequence[dict[str, Any] | None], num_thresholds: int) -> _Matches:
    known = [(place, entry) for place, entry in enumerate(entries) if entry is not None]
    num_true = np.zeros(len(entries), np.int64)
    for place, entry in known:
        num_true[place] = int((np.asarray(entry["gtIgnore"]) == 0).sum())
    if not known:
        none = np.zeros((num_thresholds, 0), bool)
        return _Matches(np.zeros(0, np.intp), none, none, num_true)
    scores = np.concatenate([np.asarray(entry["dtScores"], np.float64) for _, entry in known])
    order = np.argsort(-scores, kind="mergesort")
    picture = np.concatenate([np.full(len(entry["dtScores"]), place, np.intp) for place, entry in known])
    is_matched = np.concatenate([entry["dtMatches"] > 0 for _, entry in known], axis=1)
    is_ignored = np.concatenate([entry["dtIgnore"] > 0 for _, entry in known], axis=1)
    return _Matches(
        picture[order],
        (is_matched & ~is_ignored)[:, order],
        (~is_matched & ~is_ignored)[:, order],
        num_true,
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Compares the scores of boxes with the share of boxes that are right at an overlap of 0.5."""

    picture: NDArray[np.intp]  # [boxes]
    scores: NDArray[np.float64]  # [boxes]
    is_right: NDArray[np.bool_]  # [boxes]

    @classmethod
    def of(cls, coco_eval: Any) -> Calibration:
        """Returns the boxes that an evaluation by pycocotools counts as right or as false."""
        num_pictures = len(coco_eval.params.imgIds)
        picture: list[int] = []
        scores: list[float] = []
        is_right: list[bool] = []
        for place, entry in enumerate(coco_eval.evalImgs):
            if entry is None or entry["aRng"] != coco_eval.params.areaRng[0]:
                continue
            counts = ~(entry["dtIgnore"][_AT_50] > 0)
            picture += [place % num_pictures] * int(counts.sum())
            scores += np.asarray(entry["dtScores"], np.float64)[counts].tolist()
            is_right += (entry["dtMatches"][_AT_50] > 0)[counts].tolist()
        return cls(np.asarray(picture, np.intp), np.asarray(scores, np.float64), np.asarray(is_right, bool))

    def _sums(self, weights: Weights) -> NDArray[Any]:
        """Returns the weights of boxes, of scores and of right boxes by interval: [3, intervals]."""
        place = np.minimum((self.scores * _NUM_INTERVALS).astype(np.intp), _NUM_INTERVALS - 1)
        of_box = weights[self.picture]
        return np.stack(
            [
                np.bincount(place, of_box * values, minlength=_NUM_INTERVALS)
                for values in (np.ones(len(place)), self.scores, self.is_right)
            ]
        )

    def error(self, weights: Weights) -> float:
        """Returns the expected calibration error: the distance between the mean score and the share of right boxes
        in an interval, as a mean over boxes; NaN without boxes."""
        boxes, scores, right = self._sums(weights)
        return float(np.abs(scores - right).sum() / boxes.sum()) if boxes.sum() else float("nan")

    def errors(self, weights: Weights) -> list[float]:
        """Returns the error alone, as `bootstrap_intervals` takes it."""
        return [self.error(weights)]

    def facts(self) -> list[dict[str, float]]:
        """Returns, for each interval of scores with boxes, their number, mean score and share of right ones."""
        sums = self._sums(np.ones(int(self.picture.max(initial=0)) + 1))
        return [
            {
                "from": place / _NUM_INTERVALS,
                "to": (place + 1) / _NUM_INTERVALS,
                "boxes": int(boxes),
                "mean_score": score / boxes,
                "share_right": right / boxes,
            }
            for place, (boxes, score, right) in enumerate(sums.T.tolist())
            if boxes
        ]

    def table(self) -> list[tuple[str, ...]]:
        """Returns the reliability diagram as rows of text, with a head and a bar for the share of right boxes."""
        rows: list[tuple[str, ...]] = [("score", "boxes", "mean score", "right", "")]
        for item in self.facts():
            share = item["share_right"]
            bar = "#" * round(_BAR_CHARS * share)
            interval = f"{item['from']:.1f} to {item['to']:.1f}"
            rows.append((interval, f"{item['boxes']:.0f}", f"{item['mean_score']:.3f}", f"{share:.3f}", bar))
        return rows


def _have_scores(answers: Sequence[Answer]) -> bool:
    return all(len(answer.scores) == len(answer.boxes) for answer in answers)


def _in_pixels(box: BoxSides, image: dict[str, Any]) -> list[float]:
    left, top, right, bottom = box
    width, height = image["width"], image["height"]
    return [left * width, top * height, (right - left) * width, (bottom - top) * height]


def _in_fractions(bbox: Sequence[float], image: dict[str, Any]) -> BoxSides:
    left, top, width, height = bbox
    return (
        left / image["width"],
        top / image["height"],
        (left + width) / image["width"],
        (top + height) / image["height"],
    )
