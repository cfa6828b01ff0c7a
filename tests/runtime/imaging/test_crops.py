import gc
import io

import numpy as np
import pytest
from PIL import Image

from kestrel_runtime.imaging.crops import (
    Crops,
    DecodedImage,
    crops_bytes,
    keep_decoded,
    max_kept_bytes,
    pixels_in_place,
)
from tests.runtime.fake_cropping import FakeCropping
from tests.runtime.noise import noise

CROPPING = FakeCropping()


@pytest.mark.parametrize(("width", "height"), [(800, 557), (1, 1), (3840, 2160), (16_384, 40)])
def test_a_decoded_image_keeps_its_pixels_and_knows_its_grid(width, height):
    image = noise(width, height)
    decoded = keep_decoded(image, CROPPING)
    assert isinstance(decoded, DecodedImage)
    assert (decoded.rows, decoded.columns) == CROPPING.select(height, width)
    assert decoded.num_crops == 1 + decoded.rows * decoded.columns
    np.testing.assert_array_equal(decoded.pixels[:, :, :3], np.asarray(image))


@pytest.mark.parametrize(("width", "height"), [(4096, 2049), (16_385, 2), (2, 16_385)])
def test_an_image_whose_pixels_take_too_much_memory_is_divided_into_crops_at_once(width, height):
    image = Image.new("RGB", (width, height), (255, 0, 0))
    crops = keep_decoded(image, CROPPING)
    assert isinstance(crops, Crops)
    np.testing.assert_array_equal(crops.pixels, CROPPING.make_crops(image).pixels)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (9, 2), (9, 9)])
def test_the_memory_of_crops_is_known_from_the_size_of_the_image(width, height):
    assert crops_bytes(height, width, CROPPING) == CROPPING.make_crops(noise(width, height)).pixels.nbytes


def test_the_largest_image_is_one_of_the_most_crops_or_one_kept_decoded():
    assert max_kept_bytes(CROPPING, decoded=False) == CROPPING.make_crops(noise(9, 9)).pixels.nbytes
    decoded = keep_decoded(noise(4096, 2048), CROPPING)
    assert max_kept_bytes(CROPPING, decoded=True) == 4 * decoded.pixels.size // decoded.pixels.shape[2]


def some_image(width, height):
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (640, 481)], ids=str)
def test_pixels_are_those_of_the_image(size):
    image = some_image(*size)
    found = pixels_in_place(image)
    assert found.dtype == np.uint8
    assert found.shape == (*size[::-1], 4)
    np.testing.assert_array_equal(found[:, :, :3], np.asarray(image))


def test_a_file_is_loaded_first():
    file = io.BytesIO()
    some_image(33, 20).save(file, "PNG")
    image = Image.open(file)
    np.testing.assert_array_equal(pixels_in_place(image)[:, :, :3], np.asarray(some_image(33, 20)))


def test_pixels_outlive_the_image():
    found = [pixels_in_place(some_image(300 + i, 300)) for i in range(20)]
    gc.collect()
    others = [some_image(300, 300) for _ in range(20)]  # would take the memory if it were free
    for i, pixels in enumerate(found):
        np.testing.assert_array_equal(pixels[:, :, :3], np.asarray(some_image(300 + i, 300)))
    assert len(others) == 20


def test_pixels_in_several_blocks_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        pixels_in_place(Image.new("RGB", (4000, 4000)))
