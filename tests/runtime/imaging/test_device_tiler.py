import gc

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel_ops import Kernels
from kestrel_runtime.imaging.decoding import Crops, UncutImage, make_crops
from kestrel_runtime.imaging.device_tiler import AheadCutter, CutImage
from kestrel_runtime.imaging.tile_source import CropSource
from kestrel_runtime.models.moondream.tiling import Tiler
from tests.runtime.models.moondream.tiny import tiny_config
from tests.runtime.sequences import new_sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VISION = tiny_config(2).vision
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8))


def tiler():
    return Tiler(VISION, DEVICE, Kernels.select(DEVICE.type, {}).resample)


def refuse(_):
    raise torch.OutOfMemoryError("no room")


def test_crops_cut_ahead_are_those_of_pillow():
    image = AheadCutter(tiler().crops, DEVICE, most_images=1)(PICTURE, VISION)
    assert isinstance(image, CutImage)
    crops = image.ahead.claim()
    assert crops is not None
    assert torch.equal(crops.cpu(), torch.from_numpy(make_crops(PICTURE, VISION).pixels))


def test_whoever_encodes_finds_them_and_cuts_again_only_when_they_are_lost():
    image = AheadCutter(tiler().crops, DEVICE, most_images=1)(PICTURE, VISION)
    num_cuts = 0

    def cut(uncut):
        nonlocal num_cuts
        num_cuts += 1
        return tiler().crops(uncut)

    source, sequence = CropSource(cut, DEVICE), new_sequence(num_image_tokens=4, crops=image)
    first = source.take(sequence.whole_image)
    assert num_cuts == 0
    assert torch.equal(source.take(sequence.whole_image), first)
    assert num_cuts == 1


def test_so_many_images_are_kept_until_they_are_claimed_or_forgotten():
    cutter = AheadCutter(tiler().crops, DEVICE, most_images=2)
    images = [cutter(PICTURE, VISION) for _ in range(3)]
    assert [isinstance(image, CutImage) for image in images] == [True, True, False]
    assert isinstance(images[0], CutImage)
    images[0].ahead.claim()
    assert isinstance(cutter(PICTURE, VISION), CutImage)  # forgotten at once
    gc.collect()
    assert isinstance(cutter(PICTURE, VISION), CutImage)


def test_where_the_device_refuses_the_image_stays_uncut():
    cutter = AheadCutter(refuse, DEVICE, most_images=1)
    for _ in range(2):
        image = cutter(PICTURE, VISION)
        assert isinstance(image, UncutImage)
        assert not isinstance(image, CutImage)


def test_a_claim_is_good_once():
    image = AheadCutter(tiler().crops, DEVICE, most_images=1)(PICTURE, VISION)
    assert isinstance(image, CutImage)
    assert image.ahead.claim() is not None
    assert image.ahead.is_claimed
    assert image.ahead.claim() is None


@pytest.mark.parametrize("size", [(20000, 3), (4000, 3000)])
def test_an_image_much_larger_than_its_crops_is_cut_on_the_host(size):
    cutter = AheadCutter(refuse, DEVICE, most_images=1)
    assert isinstance(cutter(Image.new("RGB", size), VISION), Crops)
