import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kestrel_runtime.imaging.crops import Crops, DecodedImage, keep_decoded
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.imaging.lanczos import LanczosAxis, shrinks_rows_first
from kestrel_runtime.models.moondream.config import MoondreamConfig, VisionConfig
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.models.moondream.vision.device_cropping import Cropper
from tests.kernels.implementations import DEVICE, implementation_name, implementations
from tests.reference_fixtures import MD2_SMALL, expected, model_config, shared_folders
from tests.runtime.noise import noise

VISION = MoondreamConfig.from_dict(model_config(MD2_SMALL)).vision
SMALL = dataclasses.replace(VISION, enc_patch_size=2, overlap_margin=2, crop_size=14)
REFERENCE, *OTHERS = implementations("resample")
IMAGES = [
    pytest.param(folder, index, id=f"{folder.name}-{index}")
    for folder in shared_folders()
    for index in range(len(expected(folder)["images"]))
]


def make_crops(image, vision) -> Crops:
    return MoondreamCropping(vision).make_crops(image)


def select(height, width, vision):
    return MoondreamCropping(vision).select(height, width)


# On the host


@pytest.mark.parametrize(
    ("grid", "sizes"),
    [
        ((1, 1), [(1, 1), (224, 224), (378, 378), (378, 4000)]),
        ((3, 3), [(379, 379), (500, 500), (512, 512), (1024, 1024)]),
        ((2, 4), [(640, 480), (800, 600), (1280, 720), (1920, 1080), (3840, 2160), (2000, 1000)]),
        ((4, 2), [(600, 800), (1080, 1920)]),
        ((4, 3), [(768, 1024)]),
        ((1, 9), [(4000, 400)]),
        ((9, 1), [(379, 4000)]),
        ((1, 12), [(10_000, 400), (100_000, 400)]),
        ((12, 1), [(400, 10_000), (400, 100_000)]),
    ],
)
def test_the_grid_of_common_sizes(grid, sizes):
    for width, height in sizes:
        assert select(height, width, VISION) == grid, (width, height)


sides = st.one_of(st.integers(1, 1_000), st.integers(1, 100_000))


@given(height=sides, width=sides, max_crops=st.integers(1, 40))
def test_the_grid_of_any_size_stays_within_its_bound_and_turns_with_the_image(height, width, max_crops):
    vision = dataclasses.replace(VISION, max_crops=max_crops)
    rows, columns = select(height, width, vision)
    assert rows >= 1
    assert columns >= 1
    assert rows * columns <= max_crops
    if height != width:
        assert select(width, height, vision) == (columns, rows)


@pytest.mark.parametrize(("folder", "index"), IMAGES)
def test_the_grid_and_number_of_crops_equal_the_reference(folder, index):
    case = expected(folder)["images"][index]
    crops = reference_crops(folder, index)
    assert [crops.rows, crops.columns] == case["tiling"]
    assert len(crops.pixels) == case["n_crops"]


def reference_crops(folder, index) -> Crops:
    case = expected(folder)["images"][index]
    vision = MoondreamConfig.from_dict(json.loads((folder / "config.json").read_text())).vision
    return make_crops(decode_image((folder / case["image"]).read_bytes(), max_image_pixels=64_000_000), vision)


@pytest.mark.parametrize("folder", shared_folders(), ids=lambda folder: folder.name)
def test_crops_equal_those_of_the_reference_to_the_bit(folder):
    # The small folders hold no crops; there the image embeddings of the model's own tests stand in for them.
    tensors = load_file(folder / "expected.safetensors")
    for name in tensors:
        if name.endswith("_crop_u8"):
            index, which = name.split(".")
            crop = reference_crops(folder, int(index)).pixels[0 if which == "global_crop_u8" else -1]
            np.testing.assert_array_equal(crop, tensors[name], err_msg=name)


def test_a_single_crop_equals_the_whole_image():
    crops = make_crops(noise(100, 300), VISION)
    assert (crops.rows, crops.columns) == (1, 1)
    np.testing.assert_array_equal(crops.pixels[0], crops.pixels[1])


def test_an_image_of_the_size_of_a_crop_is_not_resampled():
    image = noise(VISION.crop_size, VISION.crop_size)
    np.testing.assert_array_equal(make_crops(image, VISION).pixels[0], np.asarray(image))


def vision_of(patch: int, margin: int, window: int, max_crops: int) -> VisionConfig:
    return dataclasses.replace(
        VISION,
        enc_patch_size=patch,
        overlap_margin=margin,
        crop_size=(window + 2 * margin) * patch,
        max_crops=max_crops,
    )


small_visions = st.builds(
    vision_of,
    patch=st.integers(2, 16),
    margin=st.integers(0, 4),
    window=st.integers(1, 8),
    max_crops=st.integers(1, 14),
)


@settings(max_examples=100)
@given(vision=small_visions, width=st.integers(1, 900), height=st.integers(1, 900))
def test_neighbouring_crops_of_any_size_share_their_margins(vision, width, height):
    crops = make_crops(noise(width, height), vision)
    size, shared = vision.crop_size, 2 * vision.overlap_margin * vision.enc_patch_size
    assert crops.pixels.shape == (1 + crops.rows * crops.columns, size, size, 3)
    assert crops.pixels.dtype == np.uint8
    grid = crops.pixels[1:].reshape(crops.rows, crops.columns, size, size, 3)
    left, right = grid[:, :-1, :, size - shared :], grid[:, 1:, :, :shared]
    np.testing.assert_array_equal(left, right)
    upper, lower = grid[:-1, :, size - shared :], grid[1:, :, :shared]
    np.testing.assert_array_equal(upper, lower)


# On the device


def cropper(vision, resample=REFERENCE):
    return Cropper(MoondreamCropping(vision), torch.device(DEVICE), resample)


def kept_decoded(image, vision):
    image = keep_decoded(image, MoondreamCropping(vision))
    assert isinstance(image, DecodedImage)
    return image


def assert_same_crops(cropper, image, vision):
    wanted = make_crops(image, vision)
    crops = cropper.make_crops(kept_decoded(image, vision))
    assert crops.is_contiguous()
    assert crops.device.type == DEVICE
    np.testing.assert_array_equal(crops.cpu().numpy(), wanted.pixels)


@pytest.mark.parametrize(
    ("width", "height"),
    [(800, 557), (1, 1), (1, 700), (700, 1), (378, 378), (400, 1200), (500, 390), (1100, 390), (31, 64)],
)
def test_the_device_makes_the_crops_that_workers_make(width, height):
    assert_same_crops(cropper(VISION), noise(width, height), VISION)


def test_an_image_of_the_most_crops_is_divided_into_crops():
    image = noise(768, 1024)
    assert kept_decoded(image, VISION).num_crops == 13
    assert_same_crops(cropper(VISION), image, VISION)


@settings(max_examples=60)
@given(width=st.integers(1, 120), height=st.integers(1, 120), max_crops=st.integers(1, 12))
def test_images_of_any_size_are_divided_into_crops_as_workers_divide_them(width, height, max_crops):
    vision = dataclasses.replace(SMALL, max_crops=max_crops)
    assert_same_crops(cropper(vision), noise(width, height), vision)


@pytest.mark.parametrize("resample", OTHERS, ids=implementation_name)
@pytest.mark.parametrize(("width", "height"), [(23, 20), (9, 40), (14, 14), (1, 1)])
def test_every_implementation_makes_the_same_crops(resample, width, height):
    assert_same_crops(cropper(SMALL, resample), noise(width, height), SMALL)


def calls_of(*images):
    """The arguments of each call of `resample` by one cropper."""
    seen = []

    def resample(*arguments):
        seen.append(arguments)
        return REFERENCE(*arguments)

    one = cropper(SMALL, resample)
    for image in images:
        assert_same_crops(one, image, SMALL)
    return seen


def test_an_image_is_resized_by_two_launches_whose_weights_are_kept():
    seen = calls_of(*(noise(40, 30, seed) for seed in (0, 1)))
    assert len(seen) == 4
    assert [id(taps) for _, taps, *_ in seen[:2]] == [id(taps) for _, taps, *_ in seen[2:]]


def test_where_the_whole_image_and_its_parts_lose_rows_and_columns_in_another_order_they_are_resized_apart():
    width, height = next(
        (width, height)
        for width in range(1, 60)
        for height in range(1, 120)
        if len({rows_first(width, height, *lengths) for lengths in lengths_of(width, height)}) == 2
    )
    assert len(calls_of(noise(width, height))) == 4


def lengths_of(width, height):
    rows, columns = select(height, width, SMALL)
    cropping = MoondreamCropping(SMALL)
    return (SMALL.crop_size, SMALL.crop_size), (cropping.canvas_px(rows), cropping.canvas_px(columns))


def rows_first(width, height, new_height, new_width):
    return shrinks_rows_first(LanczosAxis(height, new_height), LanczosAxis(width, new_width))


def test_the_image_itself_stays_as_it_was():
    image = kept_decoded(noise(14, 30), SMALL)
    before = image.pixels.copy()
    crops = cropper(SMALL).make_crops(image)
    crops.zero_()
    np.testing.assert_array_equal(image.pixels, before)


@pytest.mark.parametrize("writeable", [True, False])
def test_crops_that_are_made_now_are_the_same(writeable):
    image = kept_decoded(noise(100, 300), VISION)
    image.pixels.setflags(write=writeable)
    own = cropper(VISION)
    assert torch.equal(own.make_crops_now(image), own.make_crops(image))
