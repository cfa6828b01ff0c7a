import pytest
import torch
from torch.nn.functional import linear

from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    implementation_name,
    implementations,
    in_pairs,
    relative_error,
)

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


class Layer:
    """A random weight, tokens in rows that are wider than they, and the stream that their product is added to."""

    def __init__(self, batch, num_rows, width, dtype, weight_dtype):
        torch.manual_seed(batch)
        storage = torch.full((batch, width + 8), torch.nan, device=DEVICE, dtype=dtype)
        self.activations = storage[:, :width]
        self.activations.copy_(torch.randn(batch, width))
        self.weight = (torch.randn(num_rows, width) / width**0.5).to(DEVICE, weight_dtype)
        self.scale = 0.5 + torch.rand(num_rows, device=DEVICE) if weight_dtype == FLOAT8 else None
        self.bias = torch.randn(num_rows, device=DEVICE)
        self.hidden = torch.randn(batch, num_rows, device=DEVICE)

    def run(self, decode_contract, **options):
        """The stream afterwards, and what is to be added to it."""
        hidden = self.hidden.clone()
        pending = decode_contract(self.activations, self.weight, self.scale, self.bias, hidden, **options)
        return hidden, pending

    def wanted(self):
        wide = self.weight.double() if self.scale is None else self.weight.double() * self.scale[:, None].double()
        return self.hidden.double() + linear(self.activations.double(), wide, self.bias.double())


@every_implementation
@pytest.mark.parametrize(
    ("types", "sizes", "batch"),
    in_pairs(
        TYPES,
        [(48, 72), (6, 2056), (64, 1024)],  # the second has columns that several programs share
        [1, 2, 4, 5, 64, 130],  # the last is more tokens than one program has
    ),
    ids=str,
)
def test_the_product_is_added_to_the_stream(decode_contract, types, sizes, batch):
    dtype, weight_dtype, tolerance = types
    num_rows, width = sizes
    layer = Layer(batch, num_rows, width, dtype, weight_dtype)
    hidden, pending = layer.run(decode_contract)
    assert pending is None
    assert relative_error(hidden, layer.wanted()) < tolerance


@every_implementation
@pytest.mark.parametrize(
    ("batch", "types", "sizes"),
    in_pairs([1, 3, 33], TYPES, [(48, 152), (77, 40), (17, 16), (20, 1), (1, 117)]),
    ids=str,
)
def test_any_size_will_do(decode_contract, batch, types, sizes):
    dtype, weight_dtype, tolerance = types
    num_rows, width = sizes
    layer = Layer(batch, num_rows, width, dtype, weight_dtype)
    assert relative_error(layer.run(decode_contract)[0], layer.wanted()) < tolerance


@every_implementation
@pytest.mark.parametrize("batch", [1, 3, 33])
@pytest.mark.parametrize("delta_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_the_stream_and_a_delta_are_added_up_elsewhere(decode_contract, batch, delta_dtype):
    layer = Layer(batch, 48, 152, torch.float32, torch.float32)
    delta = None if delta_dtype is None else torch.randn(batch, 48, device=DEVICE).to(delta_dtype)
    total = torch.full_like(layer.hidden, torch.nan)
    hidden, pending = layer.run(decode_contract, delta=delta, total=total)
    assert pending is None
    assert torch.equal(hidden, layer.hidden)
    assert relative_error(total, layer.wanted() + (0 if delta is None else delta.double())) < 1e-5


@every_implementation
@pytest.mark.parametrize("batch", [1, 2, 33])
def test_what_is_deferred_is_what_would_have_been_added(decode_contract, batch):
    layer = Layer(batch, 48, 3000, torch.float16, FLOAT8)
    hidden, pending = layer.run(decode_contract, may_defer=True)
    if pending is not None:
        assert torch.equal(hidden, layer.hidden)
        for share in pending:
            hidden += share
    assert torch.equal(hidden, layer.run(decode_contract)[0])


@pytest.mark.parametrize(
    "decode_contract", implementations("decode_contract", ("triton",)), ids=implementation_name
)
@pytest.mark.skipif(DEVICE == "cuda", reason="on a CUDA device programs run in an order of its own")
@pytest.mark.parametrize("batch", [1, 2, 17])
@pytest.mark.parametrize(("dtype", "weight_dtype", "_"), TYPES, ids=str)
def test_the_order_of_programs_does_not_matter(
    decode_contract, batch, dtype, weight_dtype, _, last_program_first, monkeypatch
):
    layer = Layer(batch, 20, 1100, dtype, weight_dtype)
    backwards, _ = layer.run(decode_contract)
    monkeypatch.undo()
    assert torch.equal(layer.run(decode_contract)[0], backwards)


@every_implementation
@pytest.mark.skipif(DEVICE == "cpu", reason="programs run in one order without a CUDA device")
@pytest.mark.parametrize("batch", [1, 2, 16, 64])
@pytest.mark.parametrize(("dtype", "weight_dtype", "_"), TYPES, ids=str)
def test_fifty_runs_give_the_same_bits(decode_contract, batch, dtype, weight_dtype, _):
    layer = Layer(batch, 2048, 10240, dtype, weight_dtype)
    first, _ = layer.run(decode_contract)
    assert all(torch.equal(layer.run(decode_contract)[0], first) for _ in range(50))
