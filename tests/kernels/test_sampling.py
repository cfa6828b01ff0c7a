import importlib
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_ops import sample
from kestrel_ops.sampling.reference import philox
from tests.kernels.implementations import DEVICE, implementation_name, implementations

NEAR_ONE = 1 - 2**-53  # the largest a random number can be; 1 when rounded to float32
FORBIDDEN = float("-inf")

some_probabilities = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8).map(
    lambda parts: [part / sum(parts) for part in parts]
)


def draw(logits, uniform, temperature=1.0, top_p=1.0):
    """Draw from one row of logits."""
    settings = (torch.tensor([value]) for value in (temperature, top_p, uniform))
    return sample(torch.tensor([logits]), *settings).item()


def logs(*probabilities):
    return [math.log(probability) if probability else FORBIDDEN for probability in probabilities]


def frequencies(logits, temperature=1.0, top_p=1.0, count=4000):
    """How often each choice comes, over a grid of uniform numbers."""
    uniform = (torch.arange(count) + 0.5) / count
    drawn = sample(
        torch.tensor([logits]).expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        uniform,
    )
    return (drawn.bincount(minlength=len(logits)) / count).tolist()


def nucleus(probabilities, top_p):
    """Choices by falling probability while at most `top_p` has been spent before them, made to sum to one."""
    kept, spent = {}, 0.0
    for choice in sorted(range(len(probabilities)), key=lambda choice: -probabilities[choice]):
        if spent > top_p:
            break
        kept[choice] = probabilities[choice]
        spent += probabilities[choice]
    return [kept.get(choice, 0.0) / sum(kept.values()) for choice in range(len(probabilities))]


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=9, unique=True), st.floats(0, 1, exclude_max=True))
def test_temperature_zero_takes_the_largest_whatever_the_draw(logits, uniform):
    assert draw([float(logit) for logit in logits], uniform, temperature=0.0) == logits.index(max(logits))


def test_greedy_and_drawn_rows_may_share_a_batch():
    logits = torch.tensor([logs(0.4, 0.6)] * 3)
    temperature, top_p = torch.tensor([0.0, 1.0, 0.0]), torch.ones(3)
    drawn = sample(logits, temperature, top_p, torch.tensor([0.9, 0.9, 0.1]))
    assert drawn.tolist() == [1, 0, 1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, NEAR_ONE])
@pytest.mark.parametrize("top_p", [1e-45, 1e-6, 0.3])
def test_a_tiny_top_p_keeps_one_choice(top_p, uniform):
    assert draw(logs(0.2, 0.35, 0.25, 0.2), uniform, top_p=top_p) == 1


def test_the_choice_that_crosses_top_p_is_kept_and_the_next_is_not():
    assert frequencies(logs(0.5, 0.3, 0.2), top_p=0.6) == pytest.approx([5 / 8, 3 / 8, 0], abs=1e-3)
    assert frequencies(logs(0.5, 0.3, 0.2), top_p=0.4) == pytest.approx([1, 0, 0])


def test_a_choice_before_which_exactly_top_p_was_spent_is_kept():
    assert frequencies(logs(0.5, 0.25, 0.25), top_p=0.5) == pytest.approx([2 / 3, 1 / 3, 0], abs=1e-3)


@settings(max_examples=40)
@given(some_probabilities, st.floats(0.05, 1.0))
def test_choices_come_as_often_as_the_nucleus_says(probabilities, top_p):
    spent = [sum(sorted(probabilities, reverse=True)[:count]) for count in range(len(probabilities))]
    if any(abs(before - top_p) < 1e-5 for before in spent):
        return  # a draw at the very edge of the nucleus is a matter of rounding
    drawn = frequencies(logs(*probabilities), top_p=top_p)
    assert drawn == pytest.approx(nucleus(probabilities, top_p), abs=1e-3)


def test_choices_share_the_unit_interval_without_gap_or_overlap():
    quarters = [draw([0.0, 0.0, 0.0, 0.0], quarter / 4) for quarter in range(4)]
    assert sorted(quarters) == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_temperature_sharpens_and_flattens(temperature):
    parts = [part ** (1 / temperature) for part in (0.6, 0.3, 0.1)]
    wanted = [part / sum(parts) for part in parts]
    assert frequencies(logs(0.6, 0.3, 0.1), temperature=temperature) == pytest.approx(wanted, abs=1e-3)


def test_a_high_temperature_makes_all_choices_alike():
    assert frequencies([9.0, 0.0, -9.0, 3.0], temperature=1e6) == pytest.approx([0.25] * 4, abs=1e-3)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-44])
@pytest.mark.parametrize("uniform", [0.0, 0.5, NEAR_ONE])
def test_a_temperature_next_to_zero_takes_the_largest(temperature, uniform):
    assert draw([3.0, 40.0, FORBIDDEN, 39.0], uniform, temperature=temperature) == 1


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, NEAR_ONE])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 100.0])
@pytest.mark.parametrize("num_forbidden", [1, 50_000])
def test_a_forbidden_choice_is_never_drawn(uniform, temperature, num_forbidden):
    logits = [FORBIDDEN] * num_forbidden + [0.3, -2.0, 1.1]
    assert draw(logits, uniform, temperature) >= num_forbidden


@pytest.mark.parametrize("uniform", [0.0, 0.5, NEAR_ONE])
def test_a_lone_choice_is_always_drawn(uniform):
    assert draw([FORBIDDEN, FORBIDDEN, -1e4, FORBIDDEN], uniform) == 2


def test_a_row_draws_the_same_in_any_company():
    torch.manual_seed(0)
    logits = 3 * torch.randn(16, 300)
    temperature, top_p, uniform = 2 * torch.rand(16), torch.rand(16), torch.rand(16)
    temperature[::5] = 0
    together = sample(logits, temperature, top_p, uniform)
    for row in range(16):
        own = slice(row, row + 1)
        assert sample(logits[own], temperature[own], top_p[own], uniform[own]) == together[row]


def test_logits_of_a_short_type_are_drawn_in_float32():
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    one, uniform = torch.ones(64), torch.arange(64) / 64
    assert torch.equal(
        sample(logits.bfloat16().expand(64, -1), one, one, uniform),
        sample(logits.expand(64, -1), one, one, uniform),
    )


@pytest.mark.parametrize("vocabulary", [1, 77, 1024, 1025, 5000])
def test_running_sums_are_those_of_a_row_in_any_company(vocabulary):
    module = importlib.import_module("kestrel_ops.sampling.reference")
    rows = torch.rand(5, vocabulary, device=DEVICE).sort(dim=-1, descending=True).values
    together = module._running_sums(rows)
    torch.testing.assert_close(together, rows.double().cumsum(dim=-1).float(), rtol=1e-5, atol=0)
    assert (together.diff(dim=-1) >= 0).all()
    for row in range(5):
        assert torch.equal(module._running_sums(rows[row : row + 1])[0], together[row])


def test_nothing_is_summed_along_the_last_dimension(monkeypatch):
    # There a CUDA device sums in an order that depends on the number of rows.
    summed, cumsum = [], torch.Tensor.cumsum

    def recorded(rows, dim):
        summed.append((rows.dim(), dim))
        return cumsum(rows, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", recorded)
    given_settings = (torch.full((1,), value, device=DEVICE) for value in (0.7, 0.9, 0.5))
    sample(torch.randn(1, 51_200, device=DEVICE), *given_settings)
    assert len(summed) > 0
    assert all(dim in range(num_dimensions - 1) for num_dimensions, dim in summed), summed


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_fifty_draws_from_one_long_row_are_the_same():
    module = importlib.import_module("kestrel_ops.sampling.reference")
    row = torch.rand(1, 51_200, device=DEVICE)
    first = module._running_sums(row)
    assert all(torch.equal(module._running_sums(row), first) for _ in range(50))


# Top-k and min-p


def limited(logits, top_k, min_p, temperature=1.0, top_p=1.0, count=4000):
    """As `frequencies`, with the two limits."""
    uniform = (torch.arange(count) + 0.5) / count
    values = [torch.full((count,), float(value)) for value in (temperature, top_p, top_k, min_p)]
    drawn = sample(
        torch.tensor([logits]).expand(count, -1), values[0], values[1], uniform, top_k=values[2], min_p=values[3]
    )
    return (drawn.bincount(minlength=len(logits)) / count).tolist()


@pytest.mark.parametrize(
    ("top_k", "min_p", "wanted"),
    [
        (1, 0.0, [0, 1, 0, 0]),
        (2, 0.0, [0, 4 / 7, 3 / 7, 0]),
        (9, 0.0, [0.2, 0.4, 0.3, 0.1]),
        (0, 0.6, [0, 4 / 7, 3 / 7, 0]),
        (0, 0.25, [0.2, 0.4, 0.3, 0.1]),
        (0, 1.0, [0, 1, 0, 0]),
        (3, 0.6, [0, 4 / 7, 3 / 7, 0]),
    ],
)
def test_top_k_and_min_p_keep_the_most_likely(top_k, min_p, wanted):
    assert limited(logs(0.2, 0.4, 0.3, 0.1), top_k, min_p) == pytest.approx(wanted, abs=1e-3)


def test_top_p_counts_what_top_k_and_min_p_keep():
    # Of 0.4 and 0.3 the first has 0.57: with it, more than half is spent.
    assert limited(logs(0.2, 0.4, 0.3, 0.1), 2, 0.0, top_p=0.5) == pytest.approx([0, 1, 0, 0], abs=1e-3)
    assert limited(logs(0.2, 0.4, 0.3, 0.1), 2, 0.0, top_p=0.6) == pytest.approx([0, 4 / 7, 3 / 7, 0], abs=1e-3)


def test_rows_without_limits_have_the_same_bits_beside_rows_with_them():
    generator = torch.Generator(DEVICE).manual_seed(3)
    logits = torch.randn(64, 500, generator=generator, device=DEVICE) * 4
    temperature, top_p = torch.full((64,), 0.8, device=DEVICE), torch.full((64,), 0.9, device=DEVICE)
    uniform = torch.rand(64, generator=generator, device=DEVICE)
    top_k = torch.zeros(64, device=DEVICE)
    top_k[::2] = 3
    plain = sample(logits, temperature, top_p, uniform)
    beside = sample(logits, temperature, top_p, uniform, top_k, torch.zeros(64, device=DEVICE))
    assert torch.equal(plain[1::2], beside[1::2])
    assert not torch.equal(plain[::2], beside[::2])


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


@pytest.mark.parametrize("pick_allowed", implementations("pick_allowed"), ids=implementation_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_choices", [1, 50, 4096, 9001])
def test_the_first_of_the_largest_logits_that_are_allowed_is_picked(pick_allowed, dtype, num_choices):
    generator = torch.Generator().manual_seed(num_choices)
    # In bfloat16 many of these logits are equal.
    logits = torch.randn(5, num_choices, generator=generator).to(dtype)
    forbidden = torch.rand(3, num_choices, generator=generator) < 0.5
    forbidden[2] = True
    integers = torch.randint(3, (5, 6), generator=generator)
    integers[0, 2], integers[1, 2] = 2, 0
    logits[3] = 1.0
    picked = pick_allowed(logits.to(DEVICE), forbidden.to(DEVICE), integers.to(DEVICE)[:, 2])
    assert picked.dtype == torch.int64
    for row, found in enumerate(picked.tolist()):
        values, is_forbidden = logits[row].tolist(), forbidden[integers[row, 2]].tolist()
        allowed = [place for place in range(num_choices) if not is_forbidden[place]]
        assert found == (max(allowed, key=lambda place: (values[place], -place)) if allowed else 0)


@pytest.mark.parametrize("pick_allowed", implementations("pick_allowed"), ids=implementation_name)
def test_rows_of_no_numbers_have_a_choice(pick_allowed):
    logits = torch.full((2, 5000), float("nan"), device=DEVICE)
    forbidden = torch.zeros(1, 5000, dtype=torch.bool, device=DEVICE)
    picked = pick_allowed(logits, forbidden, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert all(0 <= place < 5000 for place in picked.tolist())


@pytest.mark.parametrize("advance_rows", implementations("advance_rows"), ids=implementation_name)
@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("count", [1, 33])
def test_rows_keep_their_samples_and_the_rules_that_follow(advance_rows, is_text, count):
    chance = random.Random(count)
    # Columns of a wider table, as in the request state.
    table = torch.zeros(2 * count, 12, dtype=torch.int64)
    table[:, :6] = torch.tensor([[chance.randrange(4) for _ in range(6)] for _ in range(2 * count)])
    successors = torch.tensor([[chance.randrange(-1, 4) for _ in range(4)] for _ in range(4)])
    rows = torch.tensor(chance.sample(range(2 * count), count))
    ids = torch.tensor([chance.randrange(4) for _ in range(count)])
    is_finite = torch.tensor([chance.random() < 0.8 for _ in range(count)])
    num_values, values, scores = torch.ones_like(ids), torch.rand(count, 2), torch.rand(count, 1)
    wanted, wanted_sampled = table.clone(), []
    for place, (row, id_) in enumerate(zip(rows.tolist(), ids.tolist(), strict=True)):
        _, _, rule, drawn, budget, _ = table[row, :6].tolist()
        following, leading, special, last = successors[rule].tolist()
        if drawn + 1 >= budget and last != -1:
            following = last
        if id_ == leading:
            following = special
        wanted[row, :4] = torch.tensor([id_, 0 if is_text else 1, following, drawn + 1])
        own = [0.0, 0.0] if is_text else values[place].tolist()
        wanted.view(torch.float32)[row, 14:16] = torch.tensor(own)
        score = -1.0 if is_text else scores[place].item()
        wanted_sampled.append([id_ if is_finite[place] else -1, 0 if is_text else 1, *own, score])
    table = table.to(DEVICE)
    columns = table[:, :6], table.view(torch.float32)[:, 14:16]
    given = (None, None, None) if is_text else (num_values, values, scores)
    operands = [None if item is None else item.to(DEVICE) for item in (successors, rows, ids, *given, is_finite)]
    sampled = advance_rows(*columns, *operands)
    assert sampled.tolist() == wanted_sampled
    assert torch.equal(table.cpu(), wanted)
