import random

import pytest

from kestrel_client.outlines import polylines
from kestrel_runtime.models.moondream.skills.svg import PathWriter
from training import scoring
from training.shapes import SHAPES, outline


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_the_words_of_a_shape_draw_its_outline(shape: str, seed: int):
    form = outline(shape, random.Random(seed))
    writer = PathWriter()
    path = "".join(map(writer.push, form.path))
    assert not writer.is_partial
    lines = [[(point.real, point.imag) for point in line] for line in polylines(path)]
    assert scoring.outline_iou(lines, [list(contour) for contour in form.contours]) > 0.88


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_a_shape_fills_its_box_and_its_mark_lies_on_ink(shape: str, seed: int):
    form = outline(shape, random.Random(seed))
    xs, ys = ([point[axis] for point in form.contours[0]] for axis in (0, 1))
    assert (min(xs), min(ys), max(xs), max(ys)) == pytest.approx((0, 0, 1, 1), abs=1e-6)
    assert scoring.contains([list(contour) for contour in form.contours], *form.mark)
