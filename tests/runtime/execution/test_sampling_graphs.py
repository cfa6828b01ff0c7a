import time

import pytest
import torch

from kestrel_runtime.execution.captured_graphs import GraphBudget
from kestrel_runtime.execution.sampling import DrawNeeds
from kestrel_runtime.execution.sampling_graphs import DrawGraphs, batch_sizes
from tests.runtime.fake_cuda import new_recorder, settle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS = DrawNeeds(False, False, False)


class Steps:
    """Steps that write down whom they ran for, and how often."""

    def __init__(self):
        self.written = torch.zeros(10, dtype=torch.int32, device=DEVICE)
        self.recorder = new_recorder(DEVICE)
        nobody = torch.tensor([9, 0], dtype=torch.int32, device=DEVICE)
        budget = GraphBudget(max_bytes=2**30)
        self.graphs = DrawGraphs("steps", self.step, nobody, self.recorder, budget, max_batch_size=6)

    def step(self, rows, needs):
        self.written.index_add_(0, rows[:, 0].long(), rows[:, 1])
        return rows.float() * 2


@pytest.mark.parametrize("most", [1, 5, 16, 64, 100])
def test_every_batch_has_a_size_little_above_it(most):
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for batch in range(1, most + 1):
        above = next(size for size in sizes if size >= batch)
        assert above <= max(2 * batch - 1, 8)


def test_a_replayed_step_is_the_step_and_runs_once():
    steps, wanted = Steps(), torch.zeros(10, dtype=torch.int32)
    settle(DEVICE)
    for count in (3, 5, 1, 6, 3, 5, 1, 6, 4, 2):
        rows = torch.stack((torch.arange(count), torch.randint(1, 100, (count,))), dim=1).int()
        with steps.recorder.entered():
            result = steps.graphs.replay(rows.numpy(), NEEDS).cpu()
        assert torch.equal(result, rows.float() * 2)
        wanted[:count] += rows[:, 1]
    assert torch.equal(steps.written.cpu(), wanted)
    assert len(steps.graphs.captured) == 3  # 1, 4 and 6; the size of 2 came once


def test_usual_steps_are_every_size_of_each_kind_and_run_for_nobody():
    steps, kinds = Steps(), (NEEDS, DrawNeeds(True, False, True))
    assert [key for key, _ in steps.graphs.usual(kinds)] == [
        (size, kind) for size in (6, 4, 2, 1) for kind in kinds
    ]
    settle(DEVICE)
    assert steps.graphs.captured.capture_all(steps.graphs.usual(kinds), until=time.monotonic() + 3600) == 0
    assert len(steps.graphs.captured) == 8
    settle(DEVICE)
    assert steps.written.cpu().tolist() == [0] * 10
