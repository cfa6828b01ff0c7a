import torch

from kestrel_runtime.models.moondream.calibration import calibration_tiles
from tests.runtime.models.moondream.tiny import tiny_config

CPU = torch.device("cpu")


def test_the_pictures_are_tiles_that_differ_and_stay_the_same():
    config = tiny_config().vision
    tiles = calibration_tiles(config, CPU)
    assert tiles.shape[1:] == (config.crop_size, config.crop_size, config.in_channels)
    assert tiles.dtype == torch.uint8
    assert len({tile.numpy().tobytes() for tile in tiles}) == len(tiles)
    assert torch.equal(tiles, calibration_tiles(config, CPU))


def test_the_whole_range_of_pixels_is_shown():
    tiles = calibration_tiles(tiny_config().vision, CPU)
    assert (tiles.min().item(), tiles.max().item()) == (0, 255)
