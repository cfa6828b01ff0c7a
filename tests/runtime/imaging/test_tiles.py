import numpy as np
import pytest
from PIL import Image

from kestrel_runtime.imaging.tiles import DecodedImage, Tiles, keep_decoded, max_kept_bytes, tiles_bytes
from tests.runtime.fake_tiling import FakeTiling
from tests.runtime.noise import noise

TILING = FakeTiling()


@pytest.mark.parametrize(("width", "height"), [(800, 557), (1, 1), (3840, 2160), (16_384, 40)])
def test_a_decoded_image_keeps_its_pixels_and_knows_its_tiling(width, height):
    image = noise(width, height)
    decoded = keep_decoded(image, TILING)
    assert isinstance(decoded, DecodedImage)
    assert (decoded.rows, decoded.columns) == TILING.select(height, width)
    assert decoded.num_tiles == 1 + decoded.rows * decoded.columns
    np.testing.assert_array_equal(decoded.pixels[:, :, :3], np.asarray(image))


@pytest.mark.parametrize(("width", "height"), [(4096, 2049), (16_385, 2), (2, 16_385)])
def test_an_image_whose_pixels_take_too_much_memory_is_tiled_at_once(width, height):
    image = Image.new("RGB", (width, height), (255, 0, 0))
    tiles = keep_decoded(image, TILING)
    assert isinstance(tiles, Tiles)
    np.testing.assert_array_equal(tiles.pixels, TILING.make_tiles(image).pixels)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (9, 2), (9, 9)])
def test_the_memory_of_tiles_is_known_from_the_size_of_the_image(width, height):
    assert tiles_bytes(height, width, TILING) == TILING.make_tiles(noise(width, height)).pixels.nbytes


def test_the_largest_image_is_one_of_the_most_tiles_or_one_kept_decoded():
    assert max_kept_bytes(TILING, decoded=False) == TILING.make_tiles(noise(9, 9)).pixels.nbytes
    decoded = keep_decoded(noise(4096, 2048), TILING)
    assert max_kept_bytes(TILING, decoded=True) == 4 * decoded.pixels.size // decoded.pixels.shape[2]
