import numpy as np
import pytest
import torch

from kestrel_runtime.imaging.tile_source import TileSource
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles

FIRST, SECOND = 1, 2


class CountingTiler:
    """Tiles as an image's number of tiles and its first pixel decide, and a count of how often it was asked."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, image):
        self.num_calls += 1
        shades = torch.arange(image.num_tiles, dtype=torch.uint8) + int(image.pixels.flat[0])
        return shades[:, None, None, None].expand(-1, 2, 2, 3)


@pytest.fixture
def tiler():
    return CountingTiler()


@pytest.fixture
def source(tiler):
    return TileSource(tiler, torch.from_numpy)


def decoded(shade=0, columns=4):
    return DecodedImage(np.full((3, 5, 3), shade, dtype=np.uint8), 1, columns)


def shades(tiles):
    assert tiles.shape[1:] == (2, 2, 3)
    return tiles[:, 0, 0, 0].tolist()


def test_tiles_that_are_made_already_are_uploaded(source, tiler):
    pixels = np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3)
    assert torch.equal(source.take(FIRST, Tiles(pixels, 2, 2), 1, 4), torch.from_numpy(pixels[1:4]))
    assert tiler.num_calls == 0


def test_an_image_is_tiled_once_for_all_the_steps_that_encode_it(source, tiler):
    first, second = decoded(), decoded(shade=100)
    assert shades(source.take(FIRST, first, 0, 2)) == [0, 1]
    assert shades(source.take(SECOND, second, 0, 3)) == [100, 101, 102]
    assert shades(source.take(FIRST, first, 2, 4)) == [2, 3]
    assert shades(source.take(FIRST, first, 4, 5)) == [4]
    assert shades(source.take(SECOND, second, 3, 5)) == [103, 104]
    assert tiler.num_calls == 2


def test_an_image_whose_features_were_lost_is_tiled_again(source, tiler):
    image = decoded(shade=7, columns=1)
    for _ in range(2):
        assert shades(source.take(FIRST, image, 0, 2)) == [7, 8]
    assert tiler.num_calls == 2


@pytest.mark.parametrize("forget", [lambda source: source.release(FIRST), lambda source: source.clear()])
def test_tiles_that_were_freed_are_made_again(source, tiler, forget):
    image = decoded()
    source.take(FIRST, image, 0, 2)
    forget(source)
    assert shades(source.take(FIRST, image, 0, 2)) == [0, 1]
    assert tiler.num_calls == 2


def test_an_image_of_which_nothing_is_kept_can_be_released(source):
    source.release(FIRST)
