"""Hashes are sums of products modulo 2^64, with multipliers of their own in each process."""

import numpy as np
import pytest
import torch

from kestrel_runtime.imaging.crop_hash import CropHash
from tests.kernels.implementations import DEVICE, implementation_name, implementations

DEVICES = {"reference": torch.device("cpu")}
IMPLEMENTATIONS = pytest.mark.parametrize("hash_words", implementations("hash_words"), ids=implementation_name)


def crop_hash(crop_bytes, hash_words):
    """The definition runs on the host, also where there is a GPU, and the others on the device."""
    device = DEVICES.get(implementation_name(hash_words), torch.device(DEVICE))
    make = CropHash(crop_bytes, device, hash_words)
    return make, lambda crops: make(crops).cpu()


def random_crops(num_crops: int, side: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (num_crops, side, side, 3), dtype=torch.uint8, generator=chance)


@IMPLEMENTATIONS
@pytest.mark.parametrize("side", [4, 7, 38, 75])  # 7 × 7 × 3 bytes do not fill the last word
def test_hashes_are_those_of_the_definition(hash_words, side: int):
    crops = random_crops(3, side)
    owner, make = crop_hash(3 * side**2, hash_words)
    multipliers = vars(owner)["_multipliers"].tolist()
    found = make(crops)
    assert found.shape == (3, 4)
    for crop, hashes in zip(crops, found.tolist(), strict=True):
        data = crop.numpy().tobytes()
        words = np.frombuffer(data + bytes(-len(data) % 4), np.int32).tolist()
        for own, value in zip(multipliers, hashes, strict=True):
            total = sum(word * factor for word, factor in zip(words, own, strict=True))
            assert (total - value) % 2**64 == 0


@IMPLEMENTATIONS
def test_equal_crops_have_equal_hashes_wherever_they_are(hash_words):
    crops = random_crops(5, 8)
    crops[4] = crops[1]
    _, make = crop_hash(crops[0].numel(), hash_words)
    together = make(crops)
    assert torch.equal(together[4], together[1])
    assert torch.equal(make(crops[1:2])[0], together[1])
    assert len({tuple(row) for row in together.tolist()}) == 4


@IMPLEMENTATIONS
def test_any_changed_bit_changes_all_four_hashes(hash_words):
    crop = random_crops(1, 4)
    _, make = crop_hash(crop.numel(), hash_words)
    before = make(crop)
    for place in range(crop.numel()):
        for bit in (0, 7):
            changed = crop.clone()
            changed.view(-1)[place] ^= 1 << bit
            assert (make(changed) != before).all()


@IMPLEMENTATIONS
def test_each_process_draws_its_own_multipliers(hash_words):
    crop = random_crops(1, 4)
    first, second = (crop_hash(crop.numel(), hash_words)[1](crop) for _ in range(2))
    assert (first != second).all()
