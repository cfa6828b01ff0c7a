"""How answers are scored against the truth. Pure functions: no model, no server, no files."""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from training.phrases import NUMBER_WORDS

BoxTuple = tuple[float, float, float, float]
_Z95 = 1.959964
_MASK_SIDE_PX = 256


def interval(right: float, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = right / total, _Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean, by its standard error."""
    if len(values) < 2:
        return 0.0, 1.0
    half = _Z95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return max(0.0, mean - half), min(1.0, mean + half)


def normalised(answer: str) -> str:
    """An answer without what wordings differ in: case, article, closing stop, the spelling of gray."""
    text = " ".join(answer.lower().replace("grey", "gray").split()).strip(" .!\"'")
    return re.sub(r"^(the|a|an) ", "", text)


def box_iou(first: BoxTuple, second: BoxTuple) -> float:
    """Intersection over union of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = ((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    union = sum(areas) - shared
    return shared / union if union > 0 else 0.0


def matched(predicted: Sequence[BoxTuple], truth: Sequence[BoxTuple], threshold: float) -> int:
    """How many predicted boxes find a true one of their own with at least this overlap, best pairs first."""
    pairs = sorted(
        ((box_iou(box, true), i, j) for i, box in enumerate(predicted) for j, true in enumerate(truth)),
        reverse=True,
    )
    used_predicted: set[int] = set()
    used_truth: set[int] = set()
    for overlap, i, j in pairs:
        if overlap >= threshold and i not in used_predicted and j not in used_truth:
            used_predicted.add(i)
            used_truth.add(j)
    return len(used_truth)


def average_precision(num_matched: int, num_predicted: int, num_true: int) -> float:
    """The area under the precision-recall curve of detections without scores: one point, so precision x recall."""
    if num_predicted == 0 or num_true == 0:
        return 0.0
    return (num_matched / num_predicted) * (num_matched / num_true)


def fill(polygons: Sequence[Sequence[tuple[float, float]]], frame: BoxTuple) -> Image.Image:
    """Polygons over a frame as a mask; where an even number overlap is a hole."""
    left, top, right, bottom = frame
    scale_x, scale_y = _MASK_SIDE_PX / max(right - left, 1e-9), _MASK_SIDE_PX / max(bottom - top, 1e-9)
    mask = Image.new("1", (_MASK_SIDE_PX, _MASK_SIDE_PX))
    for polygon in polygons:
        if len(polygon) < 3:
            continue
        layer = Image.new("1", mask.size)
        ImageDraw.Draw(layer).polygon([((x - left) * scale_x, (y - top) * scale_y) for x, y in polygon], fill=1)
        mask = ImageChops.logical_xor(mask, layer)
    return mask


def outline_iou(
    first: Sequence[Sequence[tuple[float, float]]], second: Sequence[Sequence[tuple[float, float]]]
) -> float:
    """Intersection over union of two sets of polygons, rasterised over the frame of both."""
    points = [point for polygons in (first, second) for polygon in polygons for point in polygon]
    if not first or not second or not points:
        return 0.0
    xs, ys = [x for x, _ in points], [y for _, y in points]
    frame = (min(xs), min(ys), max(xs), max(ys))
    masks = [np.asarray(fill(polygons, frame)) for polygons in (first, second)]
    union = (masks[0] | masks[1]).sum()
    return float((masks[0] & masks[1]).sum() / union) if union else 0.0


def contains(polygons: Sequence[Sequence[tuple[float, float]]], x: float, y: float) -> bool:
    """Whether a place lies inside the polygons, by the even-odd rule."""
    inside = False
    for polygon in polygons:
        for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
            if (y0 > y) != (y1 > y) and x < (x1 - x0) * (y - y0) / (y1 - y0) + x0:
                inside = not inside
    return inside


def shared_count(first: Counter[str], second: Counter[str]) -> int:
    """How many members two multisets share."""
    return (first & second).total()


def inventory(text: str, colors: Sequence[str], nouns: Sequence[str]) -> Counter[str]:
    """The coloured things that a description names, each as often as it counts them."""
    numbers = {"a": 1, "an": 1, "the": 1, "one": 1} | {word: value for value, word in enumerate(NUMBER_WORDS)}
    # Endings are any letters, so that plurals count under their singular.
    pattern = re.compile(
        rf"(?:\b(\w+) )?(?:(?:small|medium|large) )?\b({'|'.join(colors)}) ({'|'.join(nouns)})(e?s)?\b"
    )
    found: Counter[str] = Counter()
    for number, color, noun, _ in pattern.findall(text.lower().replace("grey", "gray")):
        count = int(number) if number.isdecimal() else numbers.get(number, 1)
        found[f"{color} {noun}"] += count
    return found
