import pytest
import torch

from kestrel_runtime.execution.graph_policy import GraphBudget
from kestrel_runtime.models.moondream.vision.graphs import EncodeGraphs
from tests.runtime.fake_cuda import new_stream_capture, settle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def encode(crops):
    return crops.float().flatten(1).cumsum(1)


def new_graphs(stream_capture, **bounds):
    return EncodeGraphs(encode, (4, 4, 3), DEVICE, stream_capture, GraphBudget(max_bytes=2**30), **bounds)


@pytest.mark.parametrize("is_warm", [False, True])
def test_replayed_encodings_are_those_of_the_encoder(is_warm):
    stream_capture = new_stream_capture(DEVICE)
    graphs = new_graphs(stream_capture, max_crops=6, max_crops_of_image=3)
    settle(DEVICE)
    if is_warm:
        graphs.captured.capture_all(graphs.usual(is_measured=True), each_runs_before=True)
        graphs.captured.capture_all(graphs.usual(is_measured=False))
    kept = []
    settle(DEVICE)
    with stream_capture.entered():
        for count in (5, 1, 3, 2, 3, 5, 1, 5, 6, 5, 7, 5):
            crops = torch.randint(0, 256, (count, 4, 4, 3), dtype=torch.uint8, device=DEVICE)
            kept.append((graphs(crops), encode(crops)))
            graphs.captured.capture_wanted()
        for features, wanted in kept:  # none was overwritten by a later one
            assert torch.equal(features, wanted)
    assert len(graphs.captured) == 4 + is_warm  # 1, 3, 5 and 6 came again; 7 are 6 and 1


@pytest.mark.parametrize(
    ("bounds", "measured", "others"),
    [
        ({"max_crops": 2, "max_crops_of_image": 13}, [13, 9], [12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1]),
        ({"max_crops": 40, "max_crops_of_image": 3}, [40, 36, 27, 18, 9, 3], [*range(34, 18, -2), 16, 14, 2, 1]),
    ],
)
def test_usual_are_the_numbers_of_crops_of_one_image_and_of_several_of_nine(bounds, measured, others):
    graphs = new_graphs(new_stream_capture(DEVICE), **bounds)
    assert [key for key, _ in graphs.usual(is_measured=True)] == measured
    assert [key for key, _ in graphs.usual(is_measured=False)] == others
