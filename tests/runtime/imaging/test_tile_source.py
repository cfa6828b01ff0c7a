import numpy as np
import pytest
import torch

from kestrel_runtime.imaging.decoding import Crops, UncutImage
from kestrel_runtime.imaging.tile_source import CropSource
from kestrel_runtime.scheduling.sequence import CropRange
from tests.runtime.sequences import new_sequence


class Cutter:
    """Crops as an image's number of tiles and its first pixel decide, and a count of how often it was asked."""

    def __init__(self):
        self.num_cuts = 0

    def __call__(self, image):
        self.num_cuts += 1
        shades = torch.arange(image.num_crops, dtype=torch.uint8) + int(image.pixels.flat[0])
        return shades[:, None, None, None].expand(-1, 2, 2, 3)


@pytest.fixture
def cutter():
    return Cutter()


@pytest.fixture
def source(cutter):
    return CropSource(cutter, torch.device("cpu"))


def sequence_of(image):
    return new_sequence(num_image_tokens=4, crops=image)


def uncut(shade=0, columns=4):
    return UncutImage(np.full((3, 5, 3), shade, dtype=np.uint8), 1, columns)


def shades(crops):
    assert crops.shape[1:] == (2, 2, 3)
    return crops[:, 0, 0, 0].tolist()


def test_crops_that_are_made_are_handed_on(source, cutter):
    pixels = np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3)
    sequence = sequence_of(Crops(pixels, 2, 2))
    assert torch.equal(source.take(CropRange(sequence, 1, 4)), torch.from_numpy(pixels[1:4]))
    assert cutter.num_cuts == 0


def test_an_image_is_cut_once_for_all_the_steps_that_encode_it(source, cutter):
    first, second = sequence_of(uncut()), sequence_of(uncut(shade=100))
    assert shades(source.take(CropRange(first, 0, 2))) == [0, 1]
    assert shades(source.take(CropRange(second, 0, 3))) == [100, 101, 102]
    assert shades(source.take(CropRange(first, 2, 4))) == [2, 3]
    assert shades(source.take(CropRange(first, 4, 5))) == [4]
    assert shades(source.take(CropRange(second, 3, 5))) == [103, 104]
    assert cutter.num_cuts == 2


def test_an_image_whose_features_were_lost_is_cut_again(source, cutter):
    sequence = sequence_of(uncut(shade=7, columns=1))
    for _ in range(2):
        assert shades(source.take(sequence.whole_image)) == [7, 8]
    assert cutter.num_cuts == 2


@pytest.mark.parametrize(
    "forget", [lambda source, sequence: source.release(sequence), lambda source, _: source.clear()]
)
def test_what_is_forgotten_is_cut_again(source, cutter, forget):
    sequence = sequence_of(uncut())
    source.take(CropRange(sequence, 0, 2))
    forget(source, sequence)
    assert shades(source.take(CropRange(sequence, 0, 2))) == [0, 1]
    assert cutter.num_cuts == 2


def test_a_sequence_of_which_nothing_is_kept_can_be_released(source):
    source.release(sequence_of(uncut()))
