"""The timing of the experts: it runs anywhere, and what it measures is what it says."""

import json
import sys

import pytest
import torch

from bench import experts
from bench.harness.expert_plans import cuts, plan_name

CPU = torch.device("cpu")
SIZES = experts.Sizes(*experts.SMALL)


def test_it_measures_every_routing_and_checks_it(tmp_path, monkeypatch, capsys):
    switches = ["--device", "cpu", "--small", "--check", "--tokens", "1", "5", "--layers", "2"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["experts", *switches, "--implementations", "library", "--json", str(tmp_path / "experts.json")],
    )
    assert experts.main() == 0
    assert "failed" not in capsys.readouterr().out
    rows = json.loads((tmp_path / "experts.json").read_text())["rows"]
    assert {(row["precision"], row["tokens"], row["routing"]) for row in rows} == {
        (precision, count, routing)
        for precision in experts.PRECISIONS
        for count in (1, 5)
        for routing in experts.ROUTINGS
    }
    assert all(0 < row["library"]["error"] < 0.02 and row["library"]["same_bits"] for row in rows)
    assert all(row["limit_us"] > 0 and row["library"]["us"] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in the interpreter")
@pytest.mark.parametrize("precision", experts.PRECISIONS)
def test_the_kernels_are_timed_stage_by_stage(precision):
    stacks, tokens = SIZES.stacks(precision, 1, CPU), [SIZES.tokens(3, "random", CPU)]
    found = experts.parts(SIZES, "triton", [], stacks, tokens, precision)
    assert list(found) == ["route", "expand", "contract", "combine"]
    assert min(found.values()) > 0


@pytest.mark.parametrize(("routing", "counts"), [("even", [5] * 8), ("skewed", [20, None, None, None, 0, 0, 0, 0])])
def test_routings_lead_tokens_where_they_say(routing, counts):
    hidden, logits = SIZES.tokens(20, routing, CPU)
    assert hidden.shape == (20, SIZES.dim)
    found = logits.topk(SIZES.moe.experts_per_token).indices.flatten().bincount(minlength=8).tolist()
    assert [count for count, wanted in zip(found, counts, strict=True) if wanted is not None] == [
        wanted for wanted in counts if wanted is not None
    ]


def test_the_limit_is_that_of_reading_for_few_tokens_and_of_multiplying_for_many():
    published = experts.published()
    assert published.limit_us(1, 8, "float8") == pytest.approx(12.1, abs=0.1)
    assert published.limit_us(64, 64, "float8") == pytest.approx(96.6, abs=0.1)
    assert published.limit_us(64, 64, "model") == pytest.approx(193.1, abs=0.1)
    assert published.limit_us(6000, 64, "float8") == pytest.approx(435.5, abs=0.1)
    assert published.limit_us(6000, 64, "model") == pytest.approx(769.4, abs=0.1)


@pytest.mark.parametrize("precision", experts.PRECISIONS)
@pytest.mark.parametrize("num_tokens", [1, 16, 746])
def test_plans_to_try_have_names_of_their_own(precision, num_tokens):
    plans = cuts(precision, num_tokens)
    assert len({plan_name(plan) for plan in plans}) == len(plans) > 30
