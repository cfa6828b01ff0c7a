import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear

from tests.kernels.implementations import DEVICE, FLOAT8, implementation_name, implementations, relative_error

EPSILON = 1e-5
# Weights, what is stored, and the relative error that the operands' and the results' rounding may leave.
TYPES = [
    (torch.float32, torch.float32, 1e-5),
    (torch.bfloat16, torch.bfloat16, 1e-2),
    (torch.float16, torch.float16, 2e-3),
    (FLOAT8, torch.float16, 2e-3),
]

every_implementation = pytest.mark.parametrize(
    "decode_expand", implementations("decode_expand"), ids=implementation_name
)


class Layer:
    """A random weight over random tokens, and output buffers filled with NaN."""

    def __init__(self, batch, width=48, num_plain=80, num_activated=48, weight_dtype=torch.float32, out_dtype=None):
        torch.manual_seed(batch)
        num_rows = num_plain + num_activated
        self.hidden = (torch.randn(batch, width) + 0.5 * torch.randn(batch, 1)).to(DEVICE)
        self.weight = (torch.randn(num_rows, width) / width**0.5).to(DEVICE, weight_dtype)
        self.scale = 0.5 + torch.rand(num_rows, device=DEVICE) if weight_dtype == FLOAT8 else None
        self.wide = self.weight.float() if self.scale is None else self.weight.float() * self.scale[:, None]
        self.bias = torch.randn(num_rows, device=DEVICE)
        self.num_plain = num_plain
        out_dtype = out_dtype or weight_dtype
        self.plain = torch.full((batch, num_plain), torch.nan, device=DEVICE, dtype=out_dtype)
        self.row = torch.full((batch, 16 + num_activated), torch.nan, device=DEVICE, dtype=out_dtype)
        self.activated = self.row[:, 16:]

    def run(self, decode_expand, pending=None, delta=None):
        decode_expand(
            self.hidden,
            self.weight,
            self.scale,
            self.wide.sum(dim=1),
            self.bias,
            EPSILON,
            self.num_plain,
            self.plain,
            self.activated,
            pending,
            delta=delta,
        )

    def wanted(self):
        """What must come out, plain and activated, in float64."""
        hidden = self.hidden.double()
        product = linear(layer_norm(hidden, hidden.shape[1:], eps=EPSILON), self.wide.double(), self.bias.double())
        return product[:, : self.num_plain], gelu(product[:, self.num_plain :], approximate="tanh")


@every_implementation
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 16, 33])
@pytest.mark.parametrize(("weight_dtype", "out_dtype", "tolerance"), TYPES, ids=str)
def test_tokens_are_normalised_multiplied_and_activated(decode_expand, batch, weight_dtype, out_dtype, tolerance):
    layer = Layer(batch, weight_dtype=weight_dtype, out_dtype=out_dtype)
    layer.run(decode_expand)
    plain, activated = layer.wanted()
    assert relative_error(layer.plain, plain) < tolerance
    assert relative_error(layer.activated, activated) < tolerance
    assert layer.row[:, :16].isnan().all()


@every_implementation
@pytest.mark.parametrize("batch", [1, 3, 33])
@pytest.mark.parametrize("delta_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_delta_counts_and_leaves_the_stream_as_it_is(decode_expand, batch, delta_dtype):
    layer = Layer(batch)
    delta, before = torch.randn(batch, 48, device=DEVICE).to(delta_dtype), layer.hidden.clone()
    layer.run(decode_expand, delta=delta)
    assert torch.equal(layer.hidden, before)
    layer.hidden += delta
    plain, activated = layer.wanted()
    assert relative_error(layer.plain, plain) < 1e-5
    assert relative_error(layer.activated, activated) < 1e-5


@every_implementation
@pytest.mark.parametrize("batch", [1, 2, 130])
@pytest.mark.parametrize(
    ("width", "num_plain", "num_activated"), [(16, 24, 8), (256, 128, 64), (40, 7, 13), (77, 60, 104), (5, 3, 2)]
)
def test_any_width_and_any_split_will_do(decode_expand, batch, width, num_plain, num_activated):
    layer = Layer(batch, width, num_plain, num_activated)
    layer.run(decode_expand)
    plain, activated = layer.wanted()
    assert relative_error(layer.plain, plain) < 1e-5
    assert relative_error(layer.activated, activated) < 1e-5


@every_implementation
@pytest.mark.parametrize("width", [2048, 2056])
@pytest.mark.parametrize("weight_dtype", [torch.float32, FLOAT8], ids=str)
def test_a_single_token_may_be_wide(decode_expand, width, weight_dtype):
    layer = Layer(1, width, num_plain=6, num_activated=10, weight_dtype=weight_dtype, out_dtype=torch.float32)
    layer.run(decode_expand)
    plain, activated = layer.wanted()
    tolerance = 1e-5 if weight_dtype == torch.float32 else 2e-3
    assert relative_error(layer.plain, plain) < tolerance
    assert relative_error(layer.activated, activated) < tolerance


@every_implementation
@pytest.mark.parametrize("batch", [1, 2, 40])
def test_a_product_may_have_no_activated_part(decode_expand, batch):
    layer = Layer(batch, num_activated=0)
    layer.run(decode_expand)
    assert relative_error(layer.plain, layer.wanted()[0]) < 1e-5


@every_implementation
@pytest.mark.parametrize("batch", [1, 40])
def test_what_float16_cannot_hold_becomes_its_largest(decode_expand, batch):
    layer = Layer(batch, weight_dtype=torch.float16)
    layer.bias[0], layer.bias[1], layer.bias[-1] = 1e6, -1e6, 1e6
    layer.run(decode_expand)
    assert (layer.plain[:, 0] == 65504).all()
    assert (layer.plain[:, 1] == -65504).all()
    assert (layer.activated[:, -1] == 65504).all()


@every_implementation
@pytest.mark.parametrize("batch", [1, 2, 33])
@pytest.mark.parametrize("width", [16, 48, 77, 300])
def test_what_is_pending_is_added_to_the_stream_first(decode_expand, batch, width):
    layer = Layer(batch, width)
    pending = torch.randn(5, batch, width, device=DEVICE)
    summed = layer.hidden.clone()
    for share in pending:
        summed += share
    layer.run(decode_expand, pending)
    assert torch.equal(layer.hidden, summed)
    plain, activated = layer.wanted()  # of the stream as it is now
    assert relative_error(layer.plain, plain) < 1e-5
    assert relative_error(layer.activated, activated) < 1e-5


@every_implementation
@pytest.mark.skipif(DEVICE == "cpu", reason="threads run one after the other without a CUDA device")
@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize("width", [48, 77, 2048])
def test_two_hundred_runs_add_what_is_pending_once(decode_expand, batch, width):
    layer = Layer(batch, width)
    hidden, pending = layer.hidden.clone(), torch.randn(8, batch, width, device=DEVICE)
    results = []
    for _ in range(200):
        layer.hidden.copy_(hidden)
        layer.run(decode_expand, pending)
        results.append((layer.hidden.clone(), layer.plain.clone(), layer.activated.clone()))
    assert relative_error(layer.plain, layer.wanted()[0]) < 1e-5
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))
