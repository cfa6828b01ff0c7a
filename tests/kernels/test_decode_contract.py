import pytest
import torch
from torch.nn.functional import linear

from tests.kernels.implementations import DEVICE, FLOAT8, implementation_name, implementations, relative_error

# Activations, weights, and the relative error that the operands' rounding may leave.
TYPES = [
    (torch.float32, torch.float32, 1e-5),
    (torch.bfloat16, torch.bfloat16, 1e-5),
    (torch.float16, torch.float16, 1e-5),
    (torch.float16, FLOAT8, 1e-5),
]

every_implementation = pytest.mark.parametrize(
    "decode_contract", implementations("decode_contract"), ids=implementation_name
)


@every_implementation
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 64, 130])
@pytest.mark.parametrize(("dtype", "weight_dtype", "tolerance"), TYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(64, 1024), (48, 72), (6, 4104)])
def test_the_product_is_added_to_the_stream(
    decode_contract, batch, dtype, weight_dtype, tolerance, num_rows, width
):
    torch.manual_seed(batch)
    room = torch.full((batch, width + 8), torch.nan, device=DEVICE, dtype=dtype)
    activations = room[:, :width]
    activations.copy_(torch.randn(batch, width))
    weight = (torch.randn(num_rows, width) / width**0.5).to(DEVICE, weight_dtype)
    scale = 0.5 + torch.rand(num_rows, device=DEVICE) if weight_dtype == FLOAT8 else None
    bias, hidden = torch.randn(num_rows, device=DEVICE), torch.randn(batch, num_rows, device=DEVICE)
    wide = weight.double() if scale is None else weight.double() * scale[:, None].double()
    wanted = hidden.double() + linear(activations.double(), wide, bias.double())
    decode_contract(activations, weight, scale, bias, hidden)
    assert relative_error(hidden, wanted) < tolerance
