import pytest
import torch

from kestrel_runtime.recording import Recording


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replay_does_the_work_again_on_what_stands_there_now():
    source = torch.zeros(3, device="cuda")
    recording = Recording.of(lambda: source * 2, torch.cuda.graph_pool_handle())
    source += 4
    recording.graph.replay()
    assert recording.result.tolist() == [8, 8, 8]
