import pytest
import torch

from kestrel_ops import RESAMPLE_WEIGHT_BITS
from kestrel_ops import resample as reference
from tests.kernels.implementations import DEVICE, implementation_name, implementations

ONE = 1 << RESAMPLE_WEIGHT_BITS
IMPLEMENTATIONS = pytest.mark.parametrize("resample", implementations("resample"), ids=implementation_name)


def taps(first, *weights):
    """First source places, and for each following place the weights in units of one."""
    rows = [first, *([round(weight * ONE) for weight in row] for row in weights)]
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def random_pixels(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(DEVICE)


def random_taps(source, length, num_weights, seed=1):
    """Weights that mostly stay within 8 bits and sometimes leave them at either end."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(source - num_weights + 1, (1, length), generator=generator)
    weights = torch.randn(num_weights, length, generator=generator).clamp(-2, 2) / num_weights
    return torch.cat((first, (weights * ONE).long())).int().to(DEVICE)


def written_out(pixels, taps, dim):
    """Every result by itself, in Python's own numbers."""
    rows = (pixels if dim == 0 else pixels.transpose(0, 1)).tolist()
    first, *weights = taps.tolist()

    def result(place, across, channel):
        terms = (row[place] * rows[first[place] + k][across][channel] for k, row in enumerate(weights))
        return min(max((sum(terms) + ONE // 2) // ONE, 0), 255)

    width, channels = len(rows[0]), pixels.shape[2]
    results = [[[result(i, j, c) for c in range(channels)] for j in range(width)] for i in range(len(first))]
    resampled = torch.tensor(results, dtype=torch.uint8)
    return resampled if dim == 0 else resampled.transpose(0, 1)


@IMPLEMENTATIONS
def test_places_are_picked_by_a_weight_of_one(resample):
    pixels = random_pixels(4, 5, 3)
    assert torch.equal(resample(pixels, taps([3, 0, 0], [1, 1, 1]), 0), pixels[[3, 0, 0]])
    assert torch.equal(resample(pixels, taps([4, 2, 0], [1, 1, 1]), 1), pixels[:, [4, 2, 0]])


@IMPLEMENTATIONS
def test_halves_are_rounded_up(resample):
    pixels = torch.tensor([[[10], [11], [254], [255]]], dtype=torch.uint8, device=DEVICE)
    assert resample(pixels, taps([0, 1, 2], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), 1).flatten().tolist() == [
        11,
        133,
        255,
    ]


@IMPLEMENTATIONS
def test_sums_beyond_eight_bits_are_clipped(resample):
    pixels = torch.tensor([[[0], [255], [0]]], dtype=torch.uint8, device=DEVICE)
    sharpened = resample(pixels, taps([0, 1], [-0.25, 1.25], [-0.25, -0.25]), 1)
    assert sharpened.flatten().tolist() == [0, 255]


@IMPLEMENTATIONS
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("shape", "length", "num_weights"),
    [((5, 7, 3), 9, 3), ((1, 1, 3), 4, 1), ((9, 6, 3), 2, 6), ((3, 8, 1), 8, 2), ((6, 200, 3), 5, 4)],
    ids=str,
)
def test_every_result_is_its_sum_written_out(resample, dim, shape, length, num_weights):
    pixels = random_pixels(*shape)
    num_weights = min(num_weights, shape[dim])
    table = random_taps(shape[dim], length, num_weights)
    resampled = resample(pixels, table, dim)
    assert resampled.is_contiguous()
    assert torch.equal(resampled.cpu(), written_out(pixels, table, dim))


@IMPLEMENTATIONS
def test_a_row_longer_than_a_block_is_whole(resample):
    pixels = random_pixels(5, 300, 3)
    table = random_taps(300, 400, 2)
    assert torch.equal(resample(pixels, table, 1), reference(pixels, table, 1))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dim", [0, 1])
def test_windows_are_parts_of_the_result(resample, dim):
    pixels = random_pixels(30, 40, 3)
    table = random_taps(pixels.shape[dim], 35, 5)
    whole = reference(pixels, table, dim)
    places = [(0, 0), (7, 11), (30 - 9 if dim else 35 - 9, 35 - 9 if dim else 40 - 9)]
    parts = resample(pixels, table, dim, torch.tensor(places, dtype=torch.int32, device=DEVICE), 9)
    assert parts.is_contiguous()
    assert parts.shape == (3, 9, 9, 3)
    for part, (top, left) in zip(parts, places, strict=True):
        assert torch.equal(part, whole[top : top + 9, left : left + 9])


@IMPLEMENTATIONS
@pytest.mark.parametrize("dim", [0, 1])
def test_a_fourth_channel_is_padding(resample, dim):
    pixels = random_pixels(12, 17, 4)
    table = random_taps(pixels.shape[dim], 8, 3)
    assert torch.equal(resample(pixels, table, dim), reference(pixels[..., :3].contiguous(), table, dim))
    windows = torch.tensor([[2, 3]], dtype=torch.int32, device=DEVICE)
    part = resample(pixels, table, dim, windows, 5)
    assert torch.equal(part[0], reference(pixels[..., :3].contiguous(), table, dim)[2:7, 3:8])
