"""Hashes are sums of products modulo 2^64, with multipliers of their own in each process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kestrel_runtime.imaging.crop_hash import CropHash

CPU = torch.device("cpu")


def random_crops(num_crops: int, side: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (num_crops, side, side, 3), dtype=torch.uint8, generator=chance)


@pytest.mark.parametrize("side", [4, 7, 14])  # 7 × 7 × 3 bytes do not fill the last word
def test_hashes_are_those_of_the_definition(side: int):
    crops = random_crops(3, side)
    make = CropHash(3 * side**2, CPU)
    multipliers = vars(make)["_multipliers"].tolist()
    found = make(crops)
    assert found.shape == (3, 4)
    for crop, hashes in zip(crops, found.tolist(), strict=True):
        data = crop.numpy().tobytes()
        words = np.frombuffer(data + bytes(-len(data) % 4), np.int32).tolist()
        for own, value in zip(multipliers, hashes, strict=True):
            total = sum(word * factor for word, factor in zip(words, own, strict=True))
            assert (total - value) % 2**64 == 0


def test_equal_crops_have_equal_hashes_wherever_they_are():
    crops = random_crops(5, 8)
    crops[4] = crops[1]
    make = CropHash(crops[0].numel(), CPU)
    together = make(crops)
    assert torch.equal(together[4], together[1])
    assert torch.equal(make(crops[1:2])[0], together[1])
    assert len({tuple(row) for row in together.tolist()}) == 4


def test_any_changed_bit_changes_all_four_hashes():
    crop = random_crops(1, 8)
    make = CropHash(crop.numel(), CPU)
    before = make(crop)
    for place in range(crop.numel()):
        for bit in (0, 7):
            changed = crop.clone()
            changed.view(-1)[place] ^= 1 << bit
            assert (make(changed) != before).all()


def test_each_process_draws_its_own_multipliers():
    crop = random_crops(1, 4)
    first, second = (CropHash(crop.numel(), CPU)(crop) for _ in range(2))
    assert (first != second).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_computes_the_same_hashes_as_the_host():
    crops = random_crops(5, 378)
    make = CropHash(crops[0].numel(), torch.device("cuda"))
    on_host = CropHash(crops[0].numel(), CPU)
    vars(on_host)["_multipliers"].copy_(vars(make)["_multipliers"])
    assert torch.equal(make(crops.cuda()).cpu(), on_host(crops))
