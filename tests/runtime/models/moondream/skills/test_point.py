import pytest

from kestrel_runtime.api.events import FinishReason, FoundObject, Location, PointOutput
from kestrel_runtime.api.requests import Point, SamplingParams
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_OBJECTS
from kestrel_runtime.models.moondream.skills.point import PointSkill
from kestrel_runtime.output.output_parser import Token, TokenRule
from tests.runtime.models.moondream.skills.parsing import (
    ANSWER,
    COORDINATE,
    EOS,
    IMAGE,
    MOONDREAM_2,
    MOONDREAM_3,
    PUBLISHED_2,
    PUBLISHED_3,
    REFERENCE_TOKENS,
    REFERENCES,
    TOKENIZER,
    consume,
    coordinate,
    output,
    plain,
    words,
)

SKILL = PointSkill()
BOTH = pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])
PUBLISHED = pytest.mark.parametrize("config", [PUBLISHED_2, PUBLISHED_3], ids=["moondream2", "moondream3"])
END = Token(EOS)
NEXT_OR_END = TokenRule(allowed=(COORDINATE, EOS), is_spatial=True)
Y = TokenRule(allowed=(COORDINATE,), is_spatial=True)


def parser(config=MOONDREAM_3, max_objects=None, max_tokens=None):
    request = Point("cat", IMAGE, max_objects, sampling=SamplingParams(max_tokens=max_tokens))
    return SKILL.new_parser(request, TOKENIZER, config)


def place(x, y):
    return [coordinate(x), coordinate(y)]


@PUBLISHED
def test_a_prompt_has_one_space_before_the_object(config):
    prompt = SKILL.prompt(Point("cat", IMAGE), TOKENIZER, config).tokens
    assert prompt == [*plain([1, 2581, 2]), *words(" cat"), *plain([ANSWER])]
    assert prompt == SKILL.prompt(Point("  cat\n", IMAGE), TOKENIZER, config).tokens


@PUBLISHED
def test_references_stand_before_the_object(config):
    prompt = SKILL.prompt(Point("cat", IMAGE, spatial_refs=REFERENCES), TOKENIZER, config).tokens
    assert prompt == [*plain([1, 2581, 2]), *REFERENCE_TOKENS, *words(" cat"), *plain([ANSWER])]


@BOTH
def test_places_come_in_the_models_order(config):
    point = parser(config)
    places = (Location(0.5, 0.25), Location(0.125, 0.75))
    assert consume(point, [*place(0.5, 0.25), *place(0.125, 0.75), END]) == [*map(FoundObject, places)]
    assert point.output() == PointOutput(places)
    assert point.finish_reason is FinishReason.STOP


def test_the_end_may_come_before_an_object_but_never_inside_one():
    point = parser()
    for token in place(0.5, 0.25):
        assert point.rule == (NEXT_OR_END if token.value == (0.5,) else Y)
        consume(point, [token])
    assert point.rule == NEXT_OR_END


def test_nothing_found_is_an_answer():
    point = parser()
    consume(point, [END])
    assert point.output() == PointOutput(())
    assert point.finish_reason is FinishReason.STOP


def test_the_last_allowed_object_ends_it():
    point = parser(max_objects=2)
    consume(point, [*place(0.1, 0.1), coordinate(0.2)])
    assert point.finish_reason is None
    consume(point, [coordinate(0.2)])
    assert point.finish_reason is FinishReason.MAX_OBJECTS
    assert len(output(point, PointOutput).points) == 2


def test_there_are_150_objects_unless_the_caller_says_otherwise():
    point = parser()
    consume(point, place(0.5, 0.5) * DEFAULT_MAX_OBJECTS)
    assert DEFAULT_MAX_OBJECTS == 150
    assert point.finish_reason is FinishReason.MAX_OBJECTS


@pytest.mark.parametrize(("max_tokens", "num_points"), [(1, 0), (2, 1), (3, 1), (5, 2)])
def test_an_object_that_max_tokens_breaks_off_is_dropped(max_tokens, num_points):
    point = parser(max_tokens=max_tokens)
    consume(point, (place(0.5, 0.5) * 3)[:max_tokens])
    assert point.finish_reason is FinishReason.LENGTH
    assert len(output(point, PointOutput).points) == num_points


def test_the_last_object_counts_before_the_last_token():
    point = parser(max_objects=1, max_tokens=2)
    consume(point, place(0.5, 0.5))
    assert point.finish_reason is FinishReason.MAX_OBJECTS


def test_a_cut_drops_an_object_begun():
    point = parser()
    consume(point, [*place(0.5, 0.25), coordinate(0.75)])
    assert list(point.truncate()) == []
    assert point.finish_reason is FinishReason.LENGTH
    assert point.output() == PointOutput((Location(0.5, 0.25),))
