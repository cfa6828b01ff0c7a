"""Scores pointing at the object of a referring expression, on the sets RefCOCO, RefCOCO+ and RefCOCOg.

A folder of theirs has `instances.json`, with the objects of pictures of COCO, and `refs(…).p`, a pickle with the
expressions. The pickle is read without letting it import anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kestrel_grpc.evaluation.metrics import is_in_box, is_in_polygons
from kestrel_grpc.evaluation.questions import read_json
from kestrel_grpc.evaluation.suitability import object_warnings
from kestrel_grpc.evaluation.tasks import (
    Answer,
    BoxSides,
    Call,
    Case,
    Label,
    Position,
    Report,
    Score,
    SetUnusable,
    find_file,
    sample,
)

DEFAULT_SPLIT = "val"
_PICTURES = "train2014"


@dataclass(frozen=True, slots=True)
class _Expression:
    name: str
    picture: str
    image: Path
    text: str
    box: BoxSides
    outlines: Sequence[Sequence[Position]]
    """The outlines of the object; if it has none, the box alone counts."""


class PointingTask:
    """Holds the expressions of one split."""

    def __init__(self, source: Path, split: str, expressions: Sequence[_Expression]) -> None:
        self.split = split
        self._source = source
        self._expressions = expressions

    @property
    def source(self) -> str:
        """The file of the expressions."""
        return str(self._source)

    @property
    def asks(self) -> str:
        """The rule by which an answer is right."""
        return "Point is asked for one object, by each expression; its point must lie in that object."

    def calls(self) -> list[Call]:
        """Returns a call of `point` for each expression. An expression names one object, so one point is asked
        for."""
        return [Call("point", item.image, item.text, max_objects=1) for item in self._expressions]

    def report(self, answers: Sequence[Answer]) -> Report:
        """Returns the shares of points within the outline and within the box.

        An answer without a point and a failed call are misses.
        """
        cases: list[Case] = []
        in_box: list[float] = []
        for item, answer in zip(self._expressions, answers, strict=True):
            point = answer.points[0] if answer.points else None
            in_box.append(float(point is not None and is_in_box(*point, item.box)))
            is_right = in_box[-1]
            if item.outlines:
                is_right = float(point is not None and is_in_polygons(*point, item.outlines))
            cases.append(
                Case(
                    item.name,
                    item.picture,
                    item.image,
                    item.text,
                    "a point in the object",
                    "no point" if point is None else f"({point[0]:.3f}, {point[1]:.3f})",
                    is_right,
                    answer.error,
                    [Label("truth", box=item.box, outlines=item.outlines)],
                    [] if point is None else [Label("answer", point=point)],
                )
            )
        pictures = [case.picture for case in cases]
        scores = [
            Score.mean("point in outline", [case.score for case in cases], pictures),
            Score.mean("point in box", in_box, pictures),
        ]
        return Report(scores, cases, warnings=tuple(object_warnings(answers)))


def open_pointing(
    folder: Path, *, split: str | None = None, pictures: Path | None = None, limit: int | None = None
) -> PointingTask:
    """Reads the expressions of a split, or a sample of `limit` of them. Raises `SetUnusable` or `OSError`."""
    split = DEFAULT_SPLIT if split is None else split
    path = find_file(folder, "expressions", "refs(unc).p", "refs(umd).p", "refs(google).p")
    refs = _read_pickle(path)
    instances_file = folder / "instances.json"
    instances = read_json(instances_file)
    places = [pictures] if pictures else [folder / _PICTURES, folder.parent / _PICTURES]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise SetUnusable(f"{places[0]}: is no folder of pictures; --pictures names another")
    try:
        images = {image["id"]: image for image in instances["images"]}
        objects = {item["id"]: item for item in instances["annotations"]}
        expressions = [
            _expression(place, images[ref["image_id"]], objects[ref["ann_id"]], sentence)
            for ref in refs
            if ref["split"] == split
            for sentence in ref["sentences"]
        ]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SetUnusable(f"{path}, {instances_file}: an entry is not in the published form ({error!r})") from error
    if not expressions:
        raise SetUnusable(f"{path}: has no split {split!r}")
    return PointingTask(path, split, sample(expressions, limit))


def _expression(place: Path, image: dict[str, Any], thing: dict[str, Any], sentence: dict[str, Any]) -> _Expression:
    width, height = image["width"], image["height"]
    left, top, box_width, box_height = thing["bbox"]
    segmentation = thing.get("segmentation")
    # Few objects have a run-length mask; their box alone counts.
    outlines = [
        [(x / width, y / height) for x, y in zip(line[::2], line[1::2], strict=True)]
        for line in (segmentation if isinstance(segmentation, list) else ())
    ]
    return _Expression(
        str(sentence["sent_id"]),
        str(image["file_name"]),
        place / image["file_name"],
        sentence["sent"],
        (left / width, top / height, (left + box_width) / width, (top + box_height) / height),
        outlines,
    )


class _DataUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, texts and numbers, which is all that these files have."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")


def _read_pickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            # The published files are of Python 2.
            return _DataUnpickler(file, encoding="utf-8").load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, AttributeError, ImportError) as error:
        raise SetUnusable(f"{path}: is not a pickle of plain data") from error
