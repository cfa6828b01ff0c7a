from dataclasses import replace
from typing import Any

import pytest
import torch

from kestrel_runtime.models.moondream.fused.calibrated_vision import CalibratedVision, calibration_crops
from kestrel_runtime.models.moondream.fused.vision import FusedVision, run_products
from tests.runtime.models.moondream.fused.test_vision import ALIGNED, KERNELS, TINY, relative_error, some_model
from tests.runtime.models.moondream.tiny import tiny_config
from tests.runtime.models.moondream.vision.test_encoder import some_crops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_features_are_about_as_good_as_with_a_scale_for_every_row(dtype):
    model = some_model(ALIGNED)
    wanted, crops = model.encode(some_crops(4, ALIGNED)), some_crops(4, ALIGNED)
    short = some_model(ALIGNED).to(dtype)
    calibrated = CalibratedVision(short, KERNELS, some_crops(2, ALIGNED, seed=1)).encode(crops)
    by_row = FusedVision(short, KERNELS, "float8").encode(crops)
    assert calibrated.dtype == dtype
    assert 1e-3 < relative_error(calibrated, wanted) < 1.5 * relative_error(by_row, wanted)


def test_values_may_be_eight_times_those_that_were_seen():
    # Blank crops leave everything small.
    model, crops = some_model(ALIGNED), some_crops(4, ALIGNED)
    blank = torch.full_like(crops[:1], 128)
    calibrated = CalibratedVision(model, KERNELS, blank).encode(crops)
    assert relative_error(calibrated, model.encode(crops)) < 0.1


def test_the_stream_after_the_last_block_is_what_features_are_made_of():
    model, crops = some_model(ALIGNED), some_crops(2, ALIGNED)
    vision = CalibratedVision(model, KERNELS, crops)
    states = list(vision.states(crops))
    assert len(states) == len(model.blocks)
    assert not torch.equal(states[0], states[-1])
    torch.testing.assert_close(model.post_ln(states[-1]).view_as(vision.encode(crops)), vision.encode(crops))


@pytest.mark.parametrize("is_float8", [True, False])
def test_products_without_weights_are_those_of_a_block(is_float8):
    calls: list[Any] = []

    def noted(name):
        def call(*operands):
            tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
            calls.append((name, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]))
            return getattr(KERNELS, name)(*operands)

        return call

    names = ("scaled_linear", "scaled_linear_add", "scaled_linear_gelu")
    kernels = replace(KERNELS, **{name: noted(name) for name in names})
    model, crops = some_model(ALIGNED).bfloat16(), some_crops(3, ALIGNED)
    vision = CalibratedVision(model, kernels, crops) if is_float8 else FusedVision(model, kernels, "model")
    calls.clear()
    vision.encode(crops)
    patches, *blocks = calls
    assert patches[0] == "scaled_linear"
    calls.clear()
    run_products(model.config, kernels, 3, torch.empty(0, dtype=torch.bfloat16), is_float8=is_float8)
    assert blocks == calls * len(model.blocks)


def test_dimensions_that_float8_products_refuse_are_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        CalibratedVision(some_model(TINY), KERNELS, some_crops(1))


CPU = torch.device("cpu")


def test_the_pictures_are_crops_that_differ_and_stay_the_same():
    config = tiny_config().vision
    crops = calibration_crops(config, CPU)
    assert crops.shape[1:] == (config.crop_size, config.crop_size, config.in_channels)
    assert crops.dtype == torch.uint8
    assert len({crop.numpy().tobytes() for crop in crops}) == len(crops)
    assert torch.equal(crops, calibration_crops(config, CPU))


def test_the_whole_range_of_pixels_is_shown():
    crops = calibration_crops(tiny_config().vision, CPU)
    assert (crops.min().item(), crops.max().item()) == (0, 255)
