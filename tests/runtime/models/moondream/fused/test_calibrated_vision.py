import pytest
import torch

from kestrel_runtime.models.moondream.fused.calibrated_vision import CalibratedVision, calibration_tiles
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from tests.runtime.models.moondream.fused.test_vision import ALIGNED, KERNELS, TINY, relative_error, some_model
from tests.runtime.models.moondream.tiny import tiny_config
from tests.runtime.models.moondream.vision.test_encoder import some_tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_features_are_about_as_good_as_with_a_scale_for_every_row(dtype):
    model = some_model(ALIGNED)
    wanted, tiles = model.encode(some_tiles(4, ALIGNED)), some_tiles(4, ALIGNED)
    short = some_model(ALIGNED).to(dtype)
    calibrated = CalibratedVision(short, KERNELS, some_tiles(2, ALIGNED, seed=1)).encode(tiles)
    by_row = FusedVision(short, KERNELS, "float8").encode(tiles)
    assert calibrated.dtype == dtype
    assert 1e-3 < relative_error(calibrated, wanted) < 1.5 * relative_error(by_row, wanted)


def test_values_may_be_eight_times_those_that_were_seen():
    # Blank tiles leave everything small.
    model, tiles = some_model(ALIGNED), some_tiles(4, ALIGNED)
    blank = torch.full_like(tiles[:1], 128)
    calibrated = CalibratedVision(model, KERNELS, blank).encode(tiles)
    assert relative_error(calibrated, model.encode(tiles)) < 0.1


def test_the_stream_after_the_last_block_is_what_features_are_made_of():
    model, tiles = some_model(ALIGNED), some_tiles(2, ALIGNED)
    vision = CalibratedVision(model, KERNELS, tiles)
    states = list(vision.states(tiles))
    assert len(states) == len(model.blocks)
    assert not torch.equal(states[0], states[-1])
    torch.testing.assert_close(model.post_ln(states[-1]).view_as(vision.encode(tiles)), vision.encode(tiles))


def test_dimensions_that_float8_products_refuse_are_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        CalibratedVision(some_model(TINY), KERNELS, some_tiles(1))


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
