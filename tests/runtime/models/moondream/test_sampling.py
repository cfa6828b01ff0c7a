import math

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.execution.request_state import RequestState, SampleNeeds
from kestrel_runtime.execution.sampling import TokenRules
from kestrel_runtime.models.moondream.sampling import MoondreamSampler, value_kinds
from kestrel_runtime.output.output_parser import OVERFLOWED, Token, TokenRule
from tests.runtime.models.moondream.tiny import random_model, tiny_config
from tests.runtime.sequences import RuleParser, new_sequence

KERNELS = Kernels.select("cpu", {})

COORDINATE, SIZE, EOS = 5, 6, 0
MODEL = random_model(tiny_config())
MODEL.text.lm_head.weight.mul_(10)
X_OR_END = TokenRule(allowed=(COORDINATE, EOS), is_spatial=True)
FREE = TokenRule()


def hidden_states(count, seed=0):
    torch.manual_seed(seed)
    return torch.randn(count, MODEL.config.text.dim)


def draw(hidden, *sequences):
    """The tokens drawn, in the order of the sequences."""
    return draw_from(MODEL, hidden, list(sequences))


def opened(model, sequences):
    """Request state with a row for each sequence, and its token rules."""
    config, device = model.config, torch.device("cpu")
    rules = TokenRules(config.text.vocab_size, device)
    state = RequestState(
        device,
        rules.row,
        lambda grammar: value_kinds(grammar, config.tokenizer),
        num_rows=len(sequences),
        max_pages=1,
        values_per_token=2,
        vocab_size=config.text.vocab_size,
    )
    for sequence in sequences:
        sequence.cache.pages = [0]
    state.open(sequences)
    return state, rules


def needs_of(state, sequences):
    return SampleNeeds(
        any(item.request.temperature > 0 for item in sequences), state.needs(sequences).sampling.value_kinds
    )


def draw_from(model, hidden, sequences):
    state, rules = opened(model, sequences)
    sampler = MoondreamSampler(model, state, rules, KERNELS)
    rows = torch.tensor([state.row(sequence) for sequence in sequences])
    sampled = sampler.sample(hidden, rows, needs_of(state, sequences))
    return [Token(int(id), tuple(values[: int(count)])) for id, count, *values in sampled.tolist()]


def scores_of(hidden, sequences):
    """The scores in the last column, of a batch."""
    state, rules = opened(MODEL, sequences)
    rows = torch.tensor([state.row(sequence) for sequence in sequences])
    sampled = MoondreamSampler(MODEL, state, rules, KERNELS).sample(hidden, rows, needs_of(state, sequences))
    return sampled[:, -1]


def mass(logits, bin_):
    """The definition: the probability of the bins at most a 64th of all bins away."""
    probabilities, reach = logits.double().softmax(dim=-1), len(logits) // 64 or 1
    return probabilities[max(bin_ - reach, 0) : bin_ + reach + 1].sum().item()


def best(logits):
    return logits.argmax(dim=-1).tolist()


def test_temperature_zero_takes_the_best_token():
    hidden = hidden_states(5)
    tokens = draw(hidden, *(new_sequence() for _ in range(5)))
    assert [token.id for token in tokens] == best(MODEL.text.logits(hidden))
    assert all(token.value == () for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("seed", range(20))
def test_only_what_the_rule_allows_is_drawn(temperature, seed):
    sequence = new_sequence(rule=TokenRule(allowed=(17, 230, 4)), temperature=temperature, seed=seed)
    (token,) = draw(hidden_states(1, seed), sequence)
    assert token.id in (17, 230, 4)


def test_among_the_allowed_the_best_is_taken():
    hidden = hidden_states(1)
    allowed = (17, 230, 4)
    logits = MODEL.text.logits(hidden)[0]
    (token,) = draw(hidden, new_sequence(rule=TokenRule(allowed)))
    assert token.id == max(allowed, key=lambda id: logits[id].item())


def test_what_the_rule_suppresses_is_not_drawn():
    hidden = hidden_states(1)
    order = MODEL.text.logits(hidden)[0].argsort(descending=True).tolist()
    (token,) = draw(hidden, new_sequence(rule=TokenRule(suppressed=tuple(order[:3]))))
    assert token.id == order[3]


def test_a_rule_binds_its_own_row_alone():
    hidden = hidden_states(1).expand(3, -1)
    free = best(MODEL.text.logits(hidden))[0]
    rules = (FREE, TokenRule(allowed=(17,)), TokenRule(suppressed=(free,)))
    tokens = draw(hidden, *(new_sequence(rule=rule) for rule in rules))
    assert (tokens[0].id, tokens[1].id) == (free, 17)
    assert tokens[2].id not in (free, 17)


# Places


def test_a_coordinate_is_read_by_the_region_head():
    hidden = hidden_states(2)
    tokens = draw(hidden, *(new_sequence(rule=TokenRule((COORDINATE,), (), True)) for _ in range(2)))
    bins = best(MODEL.region.coordinate_logits(hidden))
    assert tokens == [Token(COORDINATE, (bin_ / 1024,)) for bin_ in bins]


def test_a_size_is_read_as_width_and_height():
    hidden = hidden_states(2)
    tokens = draw(hidden, *(new_sequence(rule=TokenRule((SIZE,), (), True)) for _ in range(2)))
    for token, bins in zip(tokens, best(MODEL.region.size_logits(hidden)), strict=True):
        assert token.id == SIZE
        assert token.value == pytest.approx([2 ** (bin_ / 1023 * 10 - 10) for bin_ in bins])


def test_without_a_spatial_rule_a_place_is_a_token_like_any_other():
    tokens = draw(hidden_states(2), *(new_sequence(rule=TokenRule((id,))) for id in (COORDINATE, SIZE)))
    assert tokens == [Token(COORDINATE), Token(SIZE)]


def test_a_spatial_rule_gives_text_no_value():
    (token,) = draw(hidden_states(1), new_sequence(rule=TokenRule((17,), (), True)))
    assert token == Token(17)


def test_rows_of_every_kind_share_a_batch():
    hidden = hidden_states(5)
    rules = [FREE, X_OR_END, TokenRule((SIZE,), (), True), TokenRule((COORDINATE,), (), True), FREE]
    sequences = [new_sequence(rule=rule) for rule in rules]
    together = draw(hidden, *sequences)
    alone = [draw(hidden[row : row + 1], sequence)[0] for row, sequence in enumerate(sequences)]
    assert [token.id for token in together] == [token.id for token in alone]
    for token, other in zip(together, alone, strict=True):
        assert token.value == pytest.approx(other.value)


def test_places_are_drawn_with_the_temperature_of_their_row():
    hidden = hidden_states(1).expand(200, -1)
    rule = TokenRule((COORDINATE,), (), True)
    warm = draw(hidden, *(new_sequence(rule=rule, temperature=5.0, seed=seed) for seed in range(200)))
    cold = draw(hidden, *(new_sequence(rule=rule, seed=seed) for seed in range(200)))
    assert len(set(warm)) > 100
    assert len(set(cold)) == 1


# Randomness


def test_a_seed_repeats_a_draw_and_another_seed_does_not():
    def run(seed):
        sequence = new_sequence(temperature=2.0, seed=seed)
        return [draw(hidden_states(1, step), sequence)[0] for step in range(20)]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_what_a_sequence_draws_does_not_depend_on_its_company():
    rules = [FREE, X_OR_END, TokenRule((SIZE,), (), True)]

    def run(others):
        """What one sequence draws over some steps, beside `others` sequences of changing kinds."""
        own, drawn = new_sequence(temperature=2.0, seed=7), []
        for step in range(12):
            own.request.parser = RuleParser(rules[step % 3])
            company = [
                new_sequence(rule=rules[(step + place) % 3], temperature=float(place % 2), seed=place)
                for place in range(others)
            ]
            states = hidden_states(others, 100 + step), hidden_states(1, step)
            drawn.append(draw(torch.cat(states), *company, own)[-1])
        return drawn

    assert run(0) == run(3) == run(5)


def test_a_seed_draws_anew_with_every_token():
    hidden = hidden_states(1)

    def at(num_generated):
        sequence = new_sequence(temperature=50.0, seed=3)
        sequence.tokens += [Token(1)] * num_generated
        return draw(hidden, sequence)[0].id

    drawn = [at(count) for count in range(20)]
    assert len(set(drawn)) > 10
    assert drawn == [at(count) for count in range(20)]


def test_the_score_is_the_chance_of_going_on_times_that_of_values_near_those_chosen():
    hidden = hidden_states(20)
    y, extent = TokenRule(allowed=(COORDINATE,), is_spatial=True), TokenRule(allowed=(SIZE,), is_spatial=True)
    rules = [*[X_OR_END] * 16, y, y, extent, extent]

    def sequences():  # drawn at temperatures to which the score owes nothing
        return [
            new_sequence(rule=rule, temperature=0.0 if index % 2 else 100.0, seed=index)
            for index, rule in enumerate(rules)
        ]

    tokens = draw(hidden, *sequences())
    wanted = []
    for index, (token, rule) in enumerate(zip(tokens, rules, strict=True)):
        row = hidden[index : index + 1]
        ids = MODEL.text.logits(row)[0].double()
        chance = (ids[COORDINATE] - ids[EOS]).sigmoid().item() if rule is X_OR_END else 1.0
        if token.id == COORDINATE:
            logits = MODEL.region.coordinate_logits(row)[0]
            wanted.append(chance * mass(logits, round(token.value[0] * len(logits))))
        elif token.id == SIZE:
            logits = MODEL.region.size_logits(row)[0]
            bins = [round((math.log2(size) / 10 + 1) * (logits.shape[-1] - 1)) for size in token.value]
            wanted.append(mass(logits[0], bins[0]) * mass(logits[1], bins[1]))
        else:
            wanted.append(0.0)
    assert scores_of(hidden, sequences()).tolist() == pytest.approx(wanted, rel=1e-4)
    assert {token.id for token in tokens[:16]} == {COORDINATE, EOS}


def test_whether_an_object_comes_does_not_tell_where_it_is():
    model = random_model(tiny_config())
    model.text.lm_head.weight[[COORDINATE, EOS]] = 0  # an object or the end, as the coin falls
    model.text.lm_head.bias[[COORDINATE, EOS]] = 0
    model.region.get_parameter("coord_decoder.fc2.weight").zero_()
    model.region.get_parameter("coord_decoder.fc2.bias").copy_(-1e-4 * torch.arange(1024))
    sequences = [new_sequence(rule=X_OR_END, temperature=1.0, seed=s) for s in range(100)]
    drawn = draw_from(model, hidden_states(1).expand(100, -1), sequences)
    places = [token.value[0] for token in drawn if token.id == COORDINATE]
    assert 30 < len(places) < 70
    assert min(places) < 0.1
    assert max(places) > 0.9


def test_width_and_height_are_drawn_apart():
    model = random_model(tiny_config())
    for name in ("size_decoder.fc2.weight", "size_decoder.fc2.bias"):
        model.region.get_parameter(name).zero_()
    sequences = [new_sequence(rule=TokenRule((SIZE,), (), True), temperature=1.0, seed=s) for s in range(50)]
    drawn = draw_from(model, hidden_states(1).expand(50, -1), sequences)
    assert sum(token.value[0] == token.value[1] for token in drawn) < 5


@pytest.mark.parametrize(
    ("rule", "temperature", "needs"),
    [
        (FREE, 0.0, SampleNeeds(False, 0)),
        (FREE, 0.5, SampleNeeds(True, 0)),
        (X_OR_END, 0.0, SampleNeeds(False, 1)),
        (TokenRule(suppressed=(SIZE,), is_spatial=True), 0.0, SampleNeeds(False, 1)),
        (TokenRule((SIZE,), (), True), 0.0, SampleNeeds(False, 2)),
    ],
)
def test_a_batch_computes_what_its_rules_leave_possible(rule, temperature, needs):
    sequences = [new_sequence(rule=rule, temperature=temperature), new_sequence()]
    assert needs_of(opened(MODEL, sequences)[0], sequences) == needs


def test_what_is_sampled_is_fed_in_next():
    sequence = new_sequence(rule=TokenRule((SIZE,), (), True))
    state, rules = opened(MODEL, [sequence])
    rows = torch.tensor([state.row(sequence)])
    sampled = MoondreamSampler(MODEL, state, rules, KERNELS).sample(
        hidden_states(1), rows, needs_of(state, [sequence])
    )
    found = state.read(rows)
    assert [found.token_ids.item(), found.num_values.item()] == sampled[0, :2].tolist() == [SIZE, 2]
    assert torch.equal(state.values(rows), sampled[:, 2:4])
    assert found.num_sampled.item() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e25])
def test_a_row_whose_numbers_overflow_is_reported_and_changes_no_other(number, temperature):
    rule = TokenRule((COORDINATE,), (), True)
    sequences = [new_sequence(rule=rule, temperature=temperature, seed=seed) for seed in range(3)]
    hidden = hidden_states(3)
    expected = draw(hidden, *sequences)
    hidden[1, 7] = number
    state, rules = opened(MODEL, sequences)
    rows = torch.tensor([state.row(sequence) for sequence in sequences])
    sampled = MoondreamSampler(MODEL, state, rules, KERNELS).sample(hidden, rows, needs_of(state, sequences))
    assert sampled[:, 0].tolist() == [COORDINATE, OVERFLOWED, COORDINATE]
    assert sampled.isfinite().all()
    for row in (0, 2):
        assert sampled[row, 2].item() == expected[row].value[0]
    assert state.read(rows).token_ids.tolist() == [COORDINATE] * 3, "steps in flight read an id of the vocabulary"


def test_large_numbers_that_do_not_overflow_are_sampled():
    (token,) = draw(1e15 * hidden_states(1), new_sequence())
    assert token.id != OVERFLOWED
