"""What is drawn under each setting has the distribution of its definition: a χ² test of 4,000 seeded draws.

The seeds are fixed, so that a test always has the same result. Of sound samplers, one in a thousand would fail it.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.execution.request_state import RequestState, SampleNeeds
from kestrel_runtime.execution.sampling import TokenRules, TokenSampler
from kestrel_runtime.output.output_parser import Token, TokenRule
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.runtime.sequences import new_sequence

KERNELS = Kernels.select("cpu", {})

CPU = torch.device("cpu")
LOGITS = (2.0, 1.5, 1.45, 1.0, 0.6, 0.1, -0.3, -1.0, -1.2, -2.0)
VOCABULARY, NUM_DRAWS, FORBIDDEN = len(LOGITS), 4000, 1
RULE = TokenRule(suppressed=(FORBIDDEN,))
PROMPT, GENERATED = [0, 2, 4], [3, 3, 0, 7]
# The most that a sum of squares has at 1 to 9 degrees of freedom in 999 of 1,000 cases.
CRITICAL = (10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88)
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 4},
    "top_k of all": {"top_k": 50},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"top_k": 6, "top_p": 0.6, "temperature": 2.0},
    "min_p and top_p": {"min_p": 0.1, "top_p": 0.8, "temperature": 1.3},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": -0.6},
    "logit_bias": {"logit_bias": ((9, 3.0), (0, -100.0), (FORBIDDEN, 100.0))},
    "everything": {
        "temperature": 1.4,
        "top_k": 7,
        "min_p": 0.05,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((6, 1.0),),
    },
}


def distribution(setting: dict[str, Any]) -> list[float]:
    """By definition, step after step."""
    biases, penalty = dict(setting.get("logit_bias", ())), setting.get("repetition_penalty", 1.0)
    logits = list(LOGITS)
    for token_id in range(VOCABULARY):
        if token_id in PROMPT[1:] or token_id in GENERATED:
            logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
        logits[token_id] -= setting.get("frequency_penalty", 0.0) * GENERATED.count(token_id)
        logits[token_id] -= setting.get("presence_penalty", 0.0) * (token_id in GENERATED)
        logits[token_id] += biases.get(token_id, 0.0)
    logits[FORBIDDEN] = -math.inf
    weights = [math.exp((logit - max(logits)) / setting.get("temperature", 1.0)) for logit in logits]
    order = sorted(range(VOCABULARY), key=lambda token_id: -weights[token_id])
    kept = [token_id for token_id in order[: setting.get("top_k", VOCABULARY)] if weights[token_id] > 0]
    kept = [token_id for token_id in kept if weights[token_id] >= setting.get("min_p", 0.0) * weights[order[0]]]
    total, spent, nucleus = sum(weights[token_id] for token_id in kept), 0.0, list[int]()
    for token_id in kept:
        if spent > setting.get("top_p", 1.0) * total:
            break
        nucleus.append(token_id)
        spent += weights[token_id]
    return [weights[token_id] / spent if token_id in nucleus else 0.0 for token_id in range(VOCABULARY)]


def sequence_with(setting: dict[str, Any], seed: int) -> TokenSequence:
    params = SamplingParams(**setting)
    sequence = new_sequence(
        [Token(token_id) for token_id in PROMPT],
        rule=RULE,
        temperature=setting.get("temperature", 1.0),
        top_p=setting.get("top_p", 1.0),
        seed=seed,
        controls=params if params.controls_tokens else None,
    )
    sequence.tokens += [Token(token_id) for token_id in GENERATED]
    sequence.cache.pages = [0]
    return sequence


def draw(sequences: list[TokenSequence]) -> list[int]:
    """A token for each, in one batch."""
    return [int(row[0]) for row in sample(sequences, with_logprobs=False)]


def sample(sequences: list[TokenSequence], *, with_logprobs: bool) -> list[list[float]]:
    """What a step tells of a token for each, in one batch."""
    rules = TokenRules(VOCABULARY, CPU)
    state = RequestState(
        CPU,
        rules.row,
        lambda _: 0,
        num_rows=len(sequences),
        max_pages=1,
        values_per_token=1,
        vocab_size=VOCABULARY,
    )
    state.open(sequences)
    rows = torch.tensor([state.row(sequence) for sequence in sequences])
    is_controlled = any(sequence.request.controls is not None for sequence in sequences)
    needs = SampleNeeds(True, 0, is_controlled, with_logprobs)
    sampler = TokenSampler(state, rules, rows, needs, KERNELS)
    ids = sampler.ids(torch.tensor([LOGITS]).expand(len(sequences), -1))
    return sampler.write(ids, torch.zeros_like(ids), torch.zeros(len(ids), 1)).tolist()


def assert_drawn_from(ids: list[int], setting: dict[str, Any]) -> None:
    """χ² of the draws against the definition, at a level of 0.001."""
    counts, wanted = Counter(ids), distribution(setting)
    assert {token_id for token_id in counts if wanted[token_id] == 0.0} == set(), "drawn, but not to be drawn"
    possible = [token_id for token_id in range(VOCABULARY) if wanted[token_id]]
    squares = sum(
        (counts[token_id] - wanted[token_id] * len(ids)) ** 2 / (wanted[token_id] * len(ids))
        for token_id in possible
    )
    assert len(possible) == 1 or squares < CRITICAL[len(possible) - 2]


@pytest.mark.parametrize("name", CASES)
def test_a_setting_alone_draws_from_its_distribution(name: str) -> None:
    ids = draw([sequence_with(CASES[name], seed) for seed in range(NUM_DRAWS)])
    assert_drawn_from(ids, CASES[name])


def test_settings_in_one_batch_each_draw_from_their_own_distribution() -> None:
    names = [name for name in CASES for _ in range(NUM_DRAWS)]
    ids = draw([sequence_with(CASES[name], seed) for seed, name in enumerate(names)])
    for name, setting in CASES.items():
        assert_drawn_from([token_id for token_id, own in zip(ids, names, strict=True) if own == name], setting)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    sequences = [
        sequence_with({**setting, "temperature": temperature}, seed)
        for seed, setting in enumerate(CASES.values())
        for temperature in (0.0, 1.0, 3.0)
    ]
    together = draw(sequences)
    assert [draw([sequence])[0] for sequence in sequences] == together
    assert draw(sequences[::-1])[::-1] == together


def test_the_test_of_distributions_finds_a_wrong_one() -> None:
    ids = draw([sequence_with({"temperature": 1.3}, seed) for seed in range(NUM_DRAWS)])
    with pytest.raises(AssertionError):
        assert_drawn_from(ids, {"temperature": 1.15})
    with pytest.raises(AssertionError, match="not to be drawn"):
        assert_drawn_from(ids, {"top_k": 8, "temperature": 1.3})


@pytest.mark.parametrize("name", CASES)
def test_greedy_takes_the_largest_adjusted_logit(name: str) -> None:
    setting = {**CASES[name], "temperature": 0.0}
    wanted = distribution({**setting, "temperature": 1e-2, "top_p": 1.0, "top_k": 50, "min_p": 0.0})
    assert draw([sequence_with(setting, 5)]) == [max(range(VOCABULARY), key=wanted.__getitem__)]


@pytest.mark.parametrize("name", CASES)
def test_logprobs_are_those_of_the_model_whatever_the_settings(name: str) -> None:
    sequences = [sequence_with(CASES[name], seed) for seed in range(50)]
    drawn = draw(sequences)
    total = math.log(sum(map(math.exp, LOGITS)))
    wanted = [logit - total for logit in LOGITS]
    order = sorted(range(VOCABULARY), key=lambda token_id: -LOGITS[token_id])
    for token_id, row in zip(drawn, sample(sequences, with_logprobs=True), strict=True):
        logprob, ids, logprobs = row[4], row[5 : 5 + VOCABULARY], row[5 + VOCABULARY :]
        assert row[0] == token_id
        assert logprob == pytest.approx(wanted[token_id], abs=1e-5)
        assert ids == order
        assert logprobs == pytest.approx([wanted[place] for place in order], abs=1e-5)
