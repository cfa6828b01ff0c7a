import torch

from kestrel_runtime.models.moondream.calibration import calibration_tiles
from tests.runtime.models.moondream.tiny import tiny_config

CPU = torch.device("cpu")


def test_the_pictures_are_crops_that_differ_and_stay_the_same():
    config = tiny_config().vision
    crops = calibration_tiles(config, CPU)
    assert crops.shape[1:] == (config.crop_size, config.crop_size, config.in_channels)
    assert crops.dtype == torch.uint8
    assert len({crop.numpy().tobytes() for crop in crops}) == len(crops)
    assert torch.equal(crops, calibration_tiles(config, CPU))


def test_the_whole_range_of_pixels_is_shown():
    crops = calibration_tiles(tiny_config().vision, CPU)
    assert (crops.min().item(), crops.max().item()) == (0, 255)
