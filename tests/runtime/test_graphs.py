import pytest
import torch

from kestrel_runtime.graphs import DrawGraphs, batch_sizes
from kestrel_runtime.lane import Lane
from kestrel_runtime.recording import Recorder
from kestrel_runtime.sampling import DrawNeeds

NEEDS = DrawNeeds(False, False, False)


@pytest.mark.parametrize("most", [1, 5, 16, 64, 100])
def test_every_batch_has_a_size_little_above_it(most):
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for batch in range(1, most + 1):
        above = next(size for size in sizes if size >= batch)
        assert above <= max(2 * batch - 1, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_step_is_the_step():
    device = torch.device("cuda")
    written = torch.zeros(10, dtype=torch.int32, device=device)

    def step(rows, needs):
        written[rows[:, 0].long()] = rows[:, 1]
        return rows.float() * 2

    graphs = DrawGraphs(
        "steps",
        step,
        torch.tensor([9, 0], dtype=torch.int32, device=device),
        Recorder(Lane(torch.device("cuda"))),
        max_batch_size=6,
    )
    for count in (3, 5, 1, 6):
        rows = torch.stack((torch.arange(count), torch.randint(1, 100, (count,))), dim=1).int()
        result = graphs.replay(rows.numpy(), NEEDS)
        assert torch.equal(result.cpu(), rows.float() * 2)
        assert torch.equal(written[:count].cpu(), rows[:, 1])
