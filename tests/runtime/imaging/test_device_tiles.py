import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel_runtime.imaging.device_tiles import DeviceTiler, PrefetchedImage, TileSource
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles
from tests.runtime.fake_tiling import FakeTiling

CUDA = torch.cuda.is_available()
TILING = FakeTiling()
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8))


def tile(image):
    tiles = TILING.make_tensor(image)
    return tiles.cuda() if CUDA else tiles


def refuse(_):
    raise torch.OutOfMemoryError("no memory")


def device_tiler(tile=tile, max_images=1):
    stream = torch.cuda.Stream() if CUDA else None
    return DeviceTiler(
        TILING, tile, lambda: torch.cuda.stream(stream) if stream else nullcontext(), max_images=max_images
    )


def test_prefetched_tiles_are_those_of_the_image():
    image = device_tiler()(PICTURE)
    assert isinstance(image, PrefetchedImage)
    tiles = image.prefetched.claim()
    assert tiles is not None
    assert torch.equal(tiles.cpu(), torch.from_numpy(TILING.make_tiles(PICTURE).pixels))


def test_prefetched_tiles_are_taken_and_made_again_only_when_they_are_lost():
    image = device_tiler()(PICTURE)
    num_calls = 0

    def counted(decoded):
        nonlocal num_calls
        num_calls += 1
        return tile(decoded)

    source = TileSource(counted, torch.from_numpy)
    first = source.take(1, image, 0, image.num_tiles)
    assert num_calls == 0
    assert torch.equal(source.take(1, image, 0, image.num_tiles), first)
    assert num_calls == 1


def test_so_many_images_are_kept_until_they_are_claimed_or_freed():
    tiler = device_tiler(max_images=2)
    images = [tiler(PICTURE) for _ in range(3)]
    assert [isinstance(image, PrefetchedImage) for image in images] == [True, True, False]
    assert isinstance(images[0], PrefetchedImage)
    images[0].prefetched.claim()
    assert isinstance(tiler(PICTURE), PrefetchedImage)  # freed at once
    gc.collect()
    assert isinstance(tiler(PICTURE), PrefetchedImage)


def test_where_the_device_has_no_memory_the_image_stays_decoded():
    tiler = device_tiler(refuse)
    for _ in range(2):
        image = tiler(PICTURE)
        assert isinstance(image, DecodedImage)
        assert not isinstance(image, PrefetchedImage)


def test_prefetched_tiles_are_claimed_once():
    image = device_tiler()(PICTURE)
    assert isinstance(image, PrefetchedImage)
    assert image.prefetched.claim() is not None
    assert image.prefetched.is_claimed
    assert image.prefetched.claim() is None


@pytest.mark.parametrize("size", [(20000, 3), (4000, 3000)])
def test_an_image_much_larger_than_its_tiles_is_tiled_on_the_host(size):
    assert isinstance(device_tiler(refuse)(Image.new("RGB", size)), Tiles)


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
