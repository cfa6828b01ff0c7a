import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_runtime.imaging.decoding import UncutImage, leave_uncut, make_crops
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.tiling import Tiler
from tests.golden import MD2_SMALL, model_config
from tests.kernels.implementations import DEVICE, implementation_name, implementations
from tests.runtime.noise import noise

VISION = MoondreamConfig.from_dict(model_config(MD2_SMALL)).vision
SMALL = dataclasses.replace(VISION, enc_patch_size=2, overlap_margin=2, crop_size=14)
REFERENCE, *OTHERS = implementations("resample")


def tiler(vision, resample=REFERENCE):
    return Tiler(vision, torch.device(DEVICE), resample)


def uncut(image, vision):
    image = leave_uncut(image, vision)
    assert isinstance(image, UncutImage)
    return image


def assert_same_crops(tiler, image, vision):
    wanted = make_crops(image, vision)
    crops = tiler.crops(uncut(image, vision))
    assert crops.is_contiguous()
    assert crops.device.type == DEVICE
    np.testing.assert_array_equal(crops.cpu().numpy(), wanted.pixels)


@pytest.mark.parametrize(
    ("width", "height"),
    [(800, 557), (1, 1), (1, 700), (700, 1), (378, 378), (400, 1200), (500, 390), (1100, 390), (31, 64)],
)
def test_crops_are_those_that_workers_make(width, height):
    assert_same_crops(tiler(VISION), noise(width, height), VISION)


def test_the_largest_number_of_crops_is_cut():
    image = noise(768, 1024)
    assert uncut(image, VISION).num_crops == 13
    assert_same_crops(tiler(VISION), image, VISION)


@settings(max_examples=60)
@given(width=st.integers(1, 120), height=st.integers(1, 120), max_crops=st.integers(1, 12))
def test_images_of_any_size_are_cut_as_workers_cut_them(width, height, max_crops):
    vision = dataclasses.replace(SMALL, max_crops=max_crops)
    assert_same_crops(tiler(vision), noise(width, height), vision)


@pytest.mark.parametrize("resample", OTHERS, ids=implementation_name)
@pytest.mark.parametrize(("width", "height"), [(23, 20), (9, 40), (14, 14), (1, 1)])
def test_the_fast_way_cuts_alike(resample, width, height):
    assert_same_crops(tiler(SMALL, resample), noise(width, height), SMALL)


def test_weights_of_lengths_that_were_seen_are_kept():
    seen = []

    def resample(pixels, taps, dim):
        seen.append(taps)
        return REFERENCE(pixels, taps, dim)

    one = tiler(SMALL, resample)
    for seed in (0, 1):
        one.crops(uncut(noise(40, 30, seed), SMALL))
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == 4
    assert [id(taps) for taps in first] == [id(taps) for taps in second]


def test_the_image_itself_stays_as_it_was():
    image = uncut(noise(14, 30), SMALL)
    before = image.pixels.copy()
    crops = tiler(SMALL).crops(image)
    crops.zero_()
    np.testing.assert_array_equal(image.pixels, before)
