import pytest
import torch

from kestrel_runtime.encode_graphs import EncodeGraphs
from kestrel_runtime.lane import Lane
from kestrel_runtime.recording import Recorder

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_replayed_encodings_are_those_of_the_encoder():
    def encode(crops):
        return crops.float().flatten(1).cumsum(1)

    graphs = EncodeGraphs(encode, Recorder(Lane(torch.device("cuda"))), max_crops=6, max_crops_of_image=3)
    kept = []
    for count in (5, 1, 3, 2, 3, 5, 1, 5, 6, 5, 7, 5):
        crops = torch.randint(0, 256, (count, 4, 4, 3), dtype=torch.uint8, device="cuda")
        kept.append((graphs(crops), encode(crops)))
    for features, wanted in kept:  # none was overwritten by a later one
        assert torch.equal(features, wanted)
