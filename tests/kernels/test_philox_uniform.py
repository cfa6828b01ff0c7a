import pytest
import torch

from kestrel_ops.reference.philox_uniform import philox
from tests.kernels.implementations import DEVICE, implementation_name, implementations

every_implementation = pytest.mark.parametrize(
    "philox_uniform", implementations("philox_uniform"), ids=implementation_name
)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_the_generator_gives_the_known_answers_of_its_authors(word, wanted):
    counter = torch.tensor([word])
    seed = torch.tensor([0 if word == 0 else -1])
    assert tuple(int(part) for part in philox(seed, (counter, counter, counter, counter))) == wanted


@every_implementation
@pytest.mark.parametrize("num_rows", [1, 63, 65, 200])
def test_every_implementation_gives_the_same_bits(philox_uniform, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    seeds = torch.randint(0, 2**63 - 1, (num_rows,), generator=generator).to(DEVICE)
    counters = torch.randint(0, 2**32 - 1, (num_rows, 3), generator=generator).to(DEVICE)[:, 1]
    zeros = torch.zeros(num_rows, dtype=torch.int64)
    words = philox(seeds.cpu(), (counters.cpu(), zeros, zeros, zeros))
    wanted = torch.stack(words, dim=1).double() / 2**32
    found = philox_uniform(seeds, counters)
    assert (found.dtype, found.shape) == (torch.float32, (num_rows, 4))
    assert torch.equal(found.cpu().double(), (wanted * 2**24).floor() / 2**24)


@every_implementation
def test_numbers_are_uniform_and_depend_on_seed_and_counter_alone(philox_uniform):
    counters = torch.arange(4000, device=DEVICE)
    found = philox_uniform(torch.full_like(counters, 2**40 + 3), counters)
    assert 0 <= found.min() < 0.001
    assert 0.999 < found.max() < 1
    assert abs(found.mean().item() - 0.5) < 0.01
    assert torch.equal(philox_uniform(torch.tensor([2**40 + 3], device=DEVICE), counters[77:78])[0], found[77])
    assert not torch.equal(philox_uniform(torch.full_like(counters, 2**41 + 3), counters), found)
