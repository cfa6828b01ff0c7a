import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from kestrel_runtime.models.moondream.region import RegionModel
from tests.runtime.models.moondream.tiny import randomised, tiny_config

MLP, LINEAR = tiny_config(2).region, tiny_config(3).region


def region(config=MLP):
    return randomised(RegionModel(config))


# Values of bins


def test_a_coordinate_is_its_bin_over_the_number_of_bins():
    assert RegionModel.coordinates(torch.tensor([0, 512, 1023]), 1024).tolist() == [0.0, 0.5, 1023 / 1024]


def test_a_size_is_a_power_of_two_from_a_thousandth_to_one():
    sizes = RegionModel.sizes(torch.tensor([0, 1023]), 1024)
    assert sizes.tolist() == [2**-10, 1.0]
    assert sizes.dtype == torch.float32


@pytest.mark.parametrize("bin_", [1, 100, 512, 1000])
def test_sizes_between_are_spread_evenly_over_the_octaves(bin_):
    assert RegionModel.sizes(torch.tensor([bin_]), 1024).item() == pytest.approx(2 ** (bin_ / 1023 * 10 - 10))


# Confidence in values


@pytest.mark.parametrize("num_bins", [1024, 96, 3])
def test_the_mass_near_a_bin_is_the_sum_of_probabilities_within_a_64th_of_all_bins(num_bins):
    torch.manual_seed(num_bins)
    logits, reach = 3 * torch.randn(5, 2, num_bins), max(num_bins // 64, 1)
    bins = torch.randint(num_bins, (5, 2))
    bins[0] = torch.tensor([0, num_bins - 1])  # where half of them lie outside
    found = RegionModel.mass_near(logits, bins)
    probabilities = logits.double().softmax(dim=-1)
    for place in range(10):
        row, axis = divmod(place, 2)
        bin_ = int(bins[row, axis])
        wanted = probabilities[row, axis, max(bin_ - reach, 0) : bin_ + reach + 1].sum().item()
        assert found[row, axis].item() == pytest.approx(wanted, rel=1e-5)


def test_the_mass_near_a_certain_bin_is_one_and_never_more():
    logits = torch.full((1, 1024), -100.0)
    logits[0, 5] = 100.0
    assert RegionModel.mass_near(logits, torch.tensor([5])).tolist() == [1.0]
    assert (RegionModel.mass_near(torch.zeros(64, 1), torch.zeros(64, dtype=torch.int64)) == 1.0).all()


def test_the_mass_near_a_bin_has_the_same_bits_alone_and_among_others():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, bins = torch.randn(65, 1024).to(device), torch.randint(1024, (65,)).to(device)
    together = RegionModel.mass_near(logits, bins)
    for row in range(65):
        assert torch.equal(RegionModel.mass_near(logits[row : row + 1], bins[row : row + 1])[0], together[row])


# Values in


def test_a_coordinate_is_encoded_by_cosines_and_then_sines():
    model = region()
    values = torch.tensor([0.0, 0.25, 1.0])
    angles = [[2 * math.pi * value * weight for weight in model.coord_features[0].tolist()] for value in values]
    waves = torch.tensor([[*map(math.cos, row), *map(math.sin, row)] for row in angles])
    wanted = waves @ model.coord_encoder.weight.T + model.coord_encoder.bias
    torch.testing.assert_close(model.encode_coordinates(values), wanted, rtol=1e-4, atol=1e-5)


def test_a_size_is_encoded_from_width_and_height_together():
    model = region()
    sizes = torch.tensor([[0.5, 0.25], [1.0, 0.001]])
    wide, high = model.size_features.tolist()
    angles = [[2 * math.pi * (w * a + h * b) for a, b in zip(wide, high, strict=True)] for w, h in sizes.tolist()]
    waves = torch.tensor([[*map(math.cos, row), *map(math.sin, row)] for row in angles])
    wanted = waves @ model.size_encoder.weight.T + model.size_encoder.bias
    torch.testing.assert_close(model.encode_sizes(sizes), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.encode_sizes(sizes.flip(1)), wanted)


def test_values_are_encoded_in_the_type_of_the_weights():
    model = region().bfloat16()
    assert model.encode_coordinates(torch.tensor([0.3])).dtype == torch.bfloat16
    assert model.encode_sizes(torch.tensor([[0.3, 0.2]])).dtype == torch.bfloat16


# Values out


def test_moondream_2_reads_places_with_a_tanh_gelu_mlp():
    model, hidden = region(MLP), torch.randn(3, MLP.dim)
    parts = dict(model.named_parameters())
    for name, logits in (
        ("coord_decoder", model.coordinate_logits(hidden)),
        ("size_decoder", model.size_logits(hidden).flatten(1)),
    ):
        inner = gelu(hidden @ parts[f"{name}.fc1.weight"].T + parts[f"{name}.fc1.bias"], approximate="tanh")
        wanted = inner @ parts[f"{name}.fc2.weight"].T + parts[f"{name}.fc2.bias"]
        torch.testing.assert_close(logits, wanted)


def test_moondream_3_reads_places_with_one_layer_behind_a_norm():
    model, hidden = region(LINEAR), torch.randn(3, LINEAR.dim)
    parts = dict(model.named_parameters())
    normed = layer_norm(hidden, (LINEAR.dim,), parts["ln.weight"], parts["ln.bias"], 1e-5)
    wanted = normed @ parts["coord_decoder.weight"].T + parts["coord_decoder.bias"]
    torch.testing.assert_close(model.coordinate_logits(hidden), wanted)
    wanted = normed @ parts["size_decoder.weight"].T + parts["size_decoder.bias"]
    torch.testing.assert_close(model.size_logits(hidden).flatten(1), wanted)


@pytest.mark.parametrize("config", [MLP, LINEAR], ids=["moondream2", "moondream3"])
def test_the_first_half_of_the_size_bins_is_the_width(config):
    model, hidden = region(config), torch.randn(3, config.dim)
    assert model.coordinate_logits(hidden).shape == (3, 1024)
    logits = model.size_logits(hidden)
    assert logits.shape == (3, 2, 1024)
    bias = dict(model.named_parameters())["size_decoder.fc2.bias" if config is MLP else "size_decoder.bias"]
    bias[7] += 100  # a bin of the width
    bias[1024 + 9] += 100  # a bin of the height
    assert model.size_logits(hidden).argmax(dim=-1).tolist() == [[7, 9]] * 3
