import numpy as np
import pytest
import torch

from kestrel_runtime.execution.transfer import to_device


@pytest.mark.parametrize("data", [[1, 2, 3], np.array([1, 2, 3], dtype=np.uint8), torch.tensor([1, 2, 3])])
def test_numbers_arrive_in_their_type(data):
    arrived = to_device(data, torch.int32, torch.device("cpu"))
    assert arrived.dtype == torch.int32
    assert arrived.tolist() == [1, 2, 3]
