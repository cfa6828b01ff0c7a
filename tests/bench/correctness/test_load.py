"""The stress of mixed requests: it runs anywhere, and tells errors, leaks, ties and wrong answers apart."""

import io
import json
import math
import sys
from dataclasses import replace

import pytest
from PIL import Image

from bench.correctness import load
from bench.correctness.dimensions import shape_of, write_fixture
from bench.correctness.load import (
    Difference,
    Look,
    Outcome,
    Stress,
    first_difference,
    is_flat,
    logprob_distance,
    slopes,
    verdicts,
)
from bench.correctness.mixed_requests import (
    FEATURES,
    FORMATS,
    features_of,
    mixed_requests,
    noted_tokens,
    sizes_by_crops,
    with_features,
)
from bench.correctness.tie_judge import TOLERANCES, TieJudge
from bench.harness.checkpoints import write_adapters_of
from bench.harness.output import Progress
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.requests import Detect, Query, RequestOptions, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.family import FAMILY
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2
from kestrel_runtime.output.output_parser import Token
from tests.reference_fixtures import MD2_SMALL

CONFIG = EngineConfig(model=str(MD2_SMALL), device="cpu", dtype="float32")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def looks(*host: float) -> list[Look]:
    return [Look(requests * 100, mib, 0.0, 0.0) for requests, mib in enumerate(host)]


def test_sixty_mixed_requests_leave_nothing_behind(tmp_path, monkeypatch, capsys):
    file = tmp_path / "stress.json"
    write_fixture(tmp_path / "model", shape_of("seed-5"), with_answers=False)
    switches = ["--device", "cpu", "--requests", "60", "--distinct", "11", "--at-once", "8", "--json", str(file)]
    switches += ["--model", str(tmp_path / "model"), "--set", "max-batch-size=8"]
    monkeypatch.setattr(sys, "argv", ["load", *switches])
    assert load.main() == 0
    result = json.loads(file.read_text())
    assert result["verdicts"] == {
        "no error": True,
        "no page left": True,
        "memory flat": None,
        "answers equal": True,
        "logprobs equal": True,
    }
    assert min(result["features"].values()) > 0
    assert (result["errors"], result["pages_left"], result["requests_left"]) == ({}, 0, 0)
    assert result["tokens"] >= 60
    assert len(result["memory_mib"]) == 61
    assert "0 differ" in capsys.readouterr().out


@pytest.mark.parametrize("vision", [MOONDREAM_2.vision, LoadedModel.load(CONFIG).model.config.vision])
def test_there_is_a_picture_for_every_number_of_crops(vision):
    sizes = sizes_by_crops(vision)
    for num_crops, (width, height) in sizes.items():
        rows, columns = MoondreamCropping(vision).select(height, width)
        assert num_crops == 1 + rows * columns
    assert max(sizes) == 1 + vision.max_crops
    assert max(width * height for width, height in sizes.values()) < 4e6


def test_the_requests_are_of_every_skill_with_tokens_and_of_every_format():
    config = LoadedModel.load(EngineConfig(device="cpu")).model.config
    requests = mixed_requests(30, config)
    assert {request.skill for request in requests} == set(FAMILY.skills(config)) - {"embed"}
    files = [image for request in requests for image in request.images if isinstance(image, bytes)]
    images = [Image.open(io.BytesIO(file)) for file in files]
    assert {image.format for image in images} == {name for name, _ in FORMATS}
    assert len({image.size for image in images}) > 5
    assert any(not request.images for request in requests)
    assert mixed_requests(30, config) == requests


def test_some_requests_have_each_feature_and_none_that_is_not_asked_for():
    requests = mixed_requests(24, LoadedModel.load(EngineConfig(device="cpu")).model.config)
    every = with_features(requests, FEATURES, ["one", "two"])
    assert min(features_of(every).values()) > 0
    assert {request.options.adapter for request in every} == {"", "one", "two"}
    assert with_features(requests, (), []) == requests
    assert set(+features_of(with_features(requests, ["logprobs"], []))) == {"logprobs"}


def test_logprobs_are_compared_where_tokens_are_equal():
    one = [Token(1, logprob=-0.5, top=((1, -0.5), (2, -0.75))), Token(2, logprob=-1.0)]
    assert logprob_distance(one, list(one)) == 0
    assert logprob_distance(one, [one[0]._replace(logprob=-0.25), one[1]]) == 0.25
    assert logprob_distance(one, [one[0]._replace(top=((2, -0.5), (1, -0.625))), one[1]]) == 0.125
    assert logprob_distance(one, [one[0], Token(3, logprob=-9.0)]) == 0
    assert logprob_distance(one, [one[0]._replace(top=()), one[1]]) == math.inf
    assert first_difference(one, [Token(1), Token(2)]) is None


def test_an_answer_that_is_not_the_quiet_one_is_told_and_judged():
    loaded = LoadedModel.load(CONFIG)
    requests = [Query("What is this?", sampling=GREEDY), Query("Who is that?", sampling=GREEDY)]
    with noted_tokens() as tokens:
        engine = LocalEngine(loaded, CONFIG)
        try:
            run = Stress(engine, requests, tokens)
            run.ask_alone()
            quiet = run.quiet[1]
            assert quiet is not None
            wrong = Token((quiet[2].id + 1) % loaded.model.config.text.vocab_size)
            run.quiet[1] = [*quiet[:2], wrong, *quiet[3:]]
            run.ask_many(8, 4, Progress(1, io.StringIO()))
        finally:
            engine.close()
        assert not tokens
    ((difference, count),) = run.outcome.differences.items()
    assert difference == Difference(1, 2, wrong, quiet[2])
    assert 0 < count < 8
    (judged,) = load.judge(CONFIG, run, requests)
    assert judged.count == count
    assert judged.margin > TOLERANCES["float32"]


@pytest.fixture(scope="module")
def judge():
    judge = TieJudge(CONFIG)
    yield judge
    judge.close()


def test_margins_are_those_of_values_where_the_tokens_are_alike(judge):
    loaded = LoadedModel.load(CONFIG)
    image = io.BytesIO()
    Image.new("RGB", (60, 40), "red").save(image, "PNG")
    request = Detect("thing", image.getvalue(), 1, sampling=SamplingParams(temperature=0.0))
    with noted_tokens() as tokens:
        engine = LocalEngine(loaded, CONFIG)
        try:
            run = Stress(engine, [request], tokens)
            run.ask_alone()
        finally:
            engine.close()
    (answer,) = run.quiet
    assert answer is not None
    x, _, size = answer
    assert [len(token.value) for token in answer] == [1, 1, 2]
    moved = x._replace(value=(1.0 - x.value[0],))
    assert judge.margin(request, [], x, moved) > 0.001
    narrower = size._replace(value=(size.value[0] / 2, size.value[1]))
    assert judge.margin(request, answer[:2], size, narrower) > 0.001
    ended = Token(loaded.model.config.tokenizer.eos_id)
    assert 0 < judge.margin(request, [], x, ended) < math.inf
    assert judge.margin(request, answer[:1], answer[1], ended) == math.inf  # where only a coordinate may come


def test_a_judge_applies_adapters_and_looks_at_what_a_constraint_allows(tmp_path):
    text = LoadedModel.load(CONFIG).model.config.text
    write_adapters_of(tmp_path, text, 1, 4)
    judge = TieJudge(replace(CONFIG, adapters=str(tmp_path), num_adapter_slots=1, max_adapter_rank=4))
    try:
        plain = Query("What is this?", sampling=GREEDY)
        adapted = replace(plain, options=RequestOptions(adapter="tenant-0"))
        margins = [judge.margin(request, [], Token(5), Token(6)) for request in (plain, adapted, plain)]
        assert margins[0] == margins[2] != margins[1]
        constrained = replace(plain, constraint=Constraint(choices=("yes", "no")))
        one, others = Token(5), [Token(number) for number in range(6, 30)]
        assert min(judge.margin(constrained, [], one, other) for other in others) < 0.1
        assert min(judge.margin(plain, [], one, other) for other in others) > 0.1
    finally:
        judge.close()


def test_an_answer_that_goes_on_where_the_other_ended_is_no_tie(judge):
    assert judge.margin(Query("What?", sampling=GREEDY), [], Token(5), None) == math.inf


def test_answers_part_at_their_first_difference():
    one = [Token(1), Token(2, (0.5,)), Token(3)]
    assert first_difference(one, list(one)) is None
    assert first_difference(one, [Token(1), Token(2, (0.25,)), Token(4)]) == 1
    assert first_difference(one, one[:2]) == 2


def test_memory_is_flat_where_it_rises_only_at_first():
    assert is_flat(slopes(looks(*range(0, 200, 10), *[200, 201, 200, 199] * 6)))
    assert is_flat(slopes(looks(*[200] * 35, *[400] * 5)))
    trends = slopes(looks(*(0.5 * place for place in range(40))))
    assert trends["host"] == pytest.approx(5.0)
    assert not is_flat(trends)


def test_each_thing_that_must_hold_can_fail():
    good = Outcome(looks=looks(*[1.0] * 31))
    assert set(verdicts(good, 0, slopes(good.looks), 1e-4).values()) == {True}
    assert verdicts(good, 1, {}, 1e-4)["answers equal"] is False
    assert verdicts(Outcome(logprob_distance=0.1), 0, {}, 1e-4)["logprobs equal"] is False
    failed = Outcome(num_left=1, looks=looks(*range(31)))
    failed.errors["InternalError"] += 1
    found = verdicts(failed, 0, slopes(failed.looks), 1e-4)
    assert (found["no error"], found["no page left"], found["memory flat"]) == (False, False, False)
    assert verdicts(Outcome(num_used_pages=3), 0, {}, 1e-4)["no page left"] is False
