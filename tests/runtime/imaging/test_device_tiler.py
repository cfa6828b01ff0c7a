import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel_runtime.imaging.device_tiler import DeviceTiler, PrefetchedImage
from kestrel_runtime.imaging.tile_source import TileSource
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
