from functools import partial

import numpy as np
import pytest
import torch

from kestrel_runtime.execution.transfer import PackedLayout, StagedCopies, host_buffer, to_device

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FIELDS = {"ids": ("int64", (3,)), "pages": ("int32", (5,)), "values": ("float32", (3, 2)), "last": ("int32", (1,))}


def test_fields_begin_at_multiples_of_sixteen_bytes_and_do_not_overlap():
    layout = PackedLayout(FIELDS)
    buffer = host_buffer(layout.num_bytes, torch.device("cpu"))
    tensors = layout.tensors(buffer)
    starts = [tensor.data_ptr() - buffer.data_ptr() for tensor in tensors.values()]
    assert starts == [0, 32, 64, 96]
    assert layout.num_bytes == 112


def test_what_is_written_on_the_host_is_read_by_name_after_one_copy():
    layout = PackedLayout(FIELDS)
    buffer = host_buffer(layout.num_bytes, torch.device("cpu"))
    arrays = layout.arrays(buffer)
    arrays["ids"][:] = [2**40, -1, 7]
    arrays["pages"][:] = np.arange(5)
    arrays["values"][:] = [[0.5, 1], [2, 3], [4, 5]]
    arrays["last"][:] = -3
    tensors = layout.tensors(buffer.clone())
    assert tensors["ids"].tolist() == [2**40, -1, 7]
    assert tensors["pages"].tolist() == [0, 1, 2, 3, 4]
    assert tensors["values"].tolist() == [[0.5, 1], [2, 3], [4, 5]]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        name: (getattr(torch, dtype), shape) for name, (dtype, shape) in FIELDS.items()
    }


@pytest.mark.parametrize("data", [[1, 2, 3], np.array([1, 2, 3], dtype=np.uint8), torch.tensor([1, 2, 3])])
def test_numbers_arrive_in_their_type(data):
    arrived = to_device(data, torch.int32, torch.device("cpu"))
    assert arrived.dtype == torch.int32
    assert arrived.tolist() == [1, 2, 3]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_staged_copies_deliver_each_what_was_written_for_it(device):
    # More of them than there is host memory for at once, without waiting for any.
    staged = StagedCopies(2**20, torch.device(device))
    layouts = {
        count: partial(PackedLayout, {"ids": ("int64", (count,)), "page": ("int32", (1,))}) for count in (5, 9999)
    }
    sent, places = [], set()
    for number in range(50):
        count = (5, 9999)[number % 3 == 0]

        def fill(host, number=number):
            host["ids"][:], host["page"][:] = number, -number

        tensors = staged.send(count, layouts[count], fill)
        places.add((count, tensors["ids"].data_ptr(), tensors["page"].data_ptr()))
        sent.append((count, number, tensors["ids"].clone(), tensors["page"].clone()))
    for count, number, ids, page in sent:
        assert ids.tolist() == [number] * count
        assert page.tolist() == [-number]
    assert len(places) == 2
