import gc
import io

import numpy as np
import pytest
from PIL import Image

from kestrel_runtime.imaging.pixels_in_place import pixels_in_place


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
