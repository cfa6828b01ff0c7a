import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kestrel_ops import RESAMPLE_WEIGHT_BITS, resample
from kestrel_runtime.imaging.lanczos import LanczosAxis, shrinks_rows_first
from tests.runtime.noise import noise

sides = st.one_of(st.integers(1, 40), st.integers(1, 300))


def resized(image: Image.Image, height: int, width: int) -> np.ndarray:
    rows, columns = LanczosAxis(image.height, height), LanczosAxis(image.width, width)
    pixels = torch.from_numpy(np.array(image))
    passes = [(columns, 1), (rows, 0)]
    for axis, dim in reversed(passes) if shrinks_rows_first(rows, columns) else passes:
        pixels = resample(pixels, axis.taps(), dim)
    return pixels.numpy()


@settings(max_examples=100)
@given(width=sides, height=sides, new_width=sides, new_height=sides)
def test_both_passes_give_the_very_pixels_of_pillow(width, height, new_width, new_height):
    image = noise(width, height)
    pillow = image.resize((new_width, new_height), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(resized(image, new_height, new_width), np.asarray(pillow))


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (1, 500), (500, 1), (200, 399), (200, 402), (200, 600), (90, 91)]
)
def test_the_order_of_the_passes_is_that_of_pillow(width, height):
    image = noise(width, height)
    pillow = image.resize((90, 90), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(resized(image, 90, 90), np.asarray(pillow))


@given(source=st.integers(1, 5000), target=st.integers(1, 2000))
def test_taps_stay_within_the_source_and_weigh_one_together(source, target):
    first, *weights = LanczosAxis(source, target).taps().long()
    assert first.min() >= 0
    assert first.max() + len(weights) <= source
    total = sum(weights)
    assert isinstance(total, torch.Tensor)
    assert (total - (1 << RESAMPLE_WEIGHT_BITS)).abs().max() <= len(weights)


def test_an_axis_that_keeps_its_length_picks_its_own_pixels():
    first, *weights = LanczosAxis(50, 50).taps().tolist()
    for place in range(50):
        heavy = {first[place] + k: row[place] for k, row in enumerate(weights) if row[place]}
        assert heavy == {place: 1 << RESAMPLE_WEIGHT_BITS}
