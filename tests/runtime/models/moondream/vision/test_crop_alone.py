"""A crop has the same features alone and among others, which the crop cache relies on.

The sizes are those of Moondream 2, since libraries choose their algorithms by size; fewer blocks suffice.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kestrel_ops import Kernels, measured_products
from kestrel_runtime.execution.graph_policy import GraphBudget
from kestrel_runtime.models.moondream.fused.calibrated_vision import CalibratedVision, calibration_crops
from kestrel_runtime.models.moondream.fused.vision import FusedVision, run_products
from kestrel_runtime.models.moondream.vision.encoder import VisionModel
from kestrel_runtime.models.moondream.vision.graphs import EncodeGraphs
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2
from tests.runtime.fake_cuda import new_stream_capture, settle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = replace(MOONDREAM_2.vision, enc_n_layers=3)
DEVICE = torch.device("cuda")
NUM_CROPS = 72
Encode = Callable[[Tensor], Tensor]


def random_vision() -> VisionModel:
    torch.manual_seed(5)
    vision = VisionModel(CONFIG)
    for parameter in vision.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.03)
    return vision.to(DEVICE, torch.bfloat16).eval().requires_grad_(False)


def crops() -> Tensor:
    chance = torch.Generator().manual_seed(6)
    side = CONFIG.crop_size
    return torch.randint(0, 256, (NUM_CROPS, side, side, 3), dtype=torch.uint8, generator=chance).to(DEVICE)


def encoder(path: str) -> Encode:
    vision = random_vision()
    kernels = Kernels.select("cuda", {})
    if path == "invariant":
        return FusedVision(vision, kernels.invariant(), "model").encode
    if path == "calibrated-float8":
        return CalibratedVision(vision, kernels, calibration_crops(CONFIG, DEVICE)).encode
    return FusedVision(vision, kernels, "float8" if path == "fused-float8" else "model").encode


@torch.inference_mode()
def check(encode: Encode) -> None:
    """Compare the features of crops that are encoded by fewer and fewer at a time."""
    together = crops()
    wanted = encode(together).clone()
    for count in (36, 22, 20, 11, 9, 5, 2, 1):
        for start in (0, NUM_CROPS - count, 31 if count < 9 else 7):
            found = encode(together[start : start + count])
            different = (found != wanted[start : start + count]).flatten(1).any(1).nonzero().flatten().tolist()
            assert not different, f"of {count} crops from {start}"


@pytest.mark.parametrize("path", ["fused", "fused-float8", "calibrated-float8", "invariant"])
def test_a_crop_alone_has_the_bits_that_it_has_among_71_others(path: str):
    check(encoder(path))


@pytest.mark.parametrize("path", ["fused", "calibrated-float8", "invariant"])
@torch.inference_mode()
def test_a_crop_has_the_same_bits_by_every_captured_graph(path: str):
    stream_capture = new_stream_capture(DEVICE)
    shape = (CONFIG.crop_size, CONFIG.crop_size, CONFIG.in_channels)
    graphs = EncodeGraphs(
        encoder(path),
        shape,
        DEVICE,
        stream_capture,
        GraphBudget(max_bytes=2**34),
        max_crops=NUM_CROPS,
        max_crops_of_image=13,
    )
    settle(DEVICE)
    with measured_products({}):
        graphs.captured.capture_all(graphs.usual(is_measured=True), each_runs_before=True)
    graphs.captured.capture_all(graphs.usual(is_measured=False))
    settle(DEVICE)
    with stream_capture.entered():
        check(graphs)
    settle(DEVICE)


@pytest.mark.parametrize("path", ["fused", "calibrated-float8"])
@torch.inference_mode()
def test_products_are_measured_without_weights(path: str):
    encode, choices = encoder(path), dict[str, int]()
    with measured_products(choices):
        out, kernels = torch.empty(0, dtype=torch.bfloat16, device=DEVICE), Kernels.select("cuda", {})
        # A process measures a number of crops once.
        run_products(CONFIG, kernels, 10, out, is_float8=path == "calibrated-float8")
        measured = set(choices)
        encode(crops()[:10])
    assert len(measured) >= 3
    assert set(choices) == measured


@torch.inference_mode()
def test_a_crop_alone_is_close_to_itself_among_others_on_the_plain_path_in_float32():
    vision = random_vision().float()
    together = crops()[:18]
    wanted = vision.encode(together)
    assert torch.allclose(vision.encode(together[4:5]), wanted[4:5], rtol=1e-4, atol=1e-4)
