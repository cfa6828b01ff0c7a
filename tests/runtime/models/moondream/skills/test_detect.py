import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.api.events import Box, DetectOutput, FinishReason, FoundObject
from kestrel_runtime.api.requests import Detect, SamplingParams
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_OBJECTS
from kestrel_runtime.models.moondream.skills.detect import DetectSkill, box_around
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
    SIZE,
    TOKENIZER,
    consume,
    coordinate,
    output,
    plain,
    size,
    words,
)

SKILL = DetectSkill()
BOTH = pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])
END = Token(EOS)
NEXT_OR_END = TokenRule(allowed=(COORDINATE, EOS), is_spatial=True)
Y = TokenRule(allowed=(COORDINATE,), is_spatial=True)
EXTENT = TokenRule(allowed=(SIZE,), is_spatial=True)
OBJECT = [coordinate(0.5), coordinate(0.25), size(0.5, 0.25)]
OBJECT_BOX = Box(0.25, 0.125, 0.75, 0.375)

fractions = st.floats(0, 1)


def parser(config=MOONDREAM_3, max_objects=None, max_tokens=None):
    request = Detect("cat", IMAGE, max_objects, sampling=SamplingParams(max_tokens=max_tokens))
    return SKILL.new_parser(request, TOKENIZER, config)


@pytest.mark.parametrize("config", [PUBLISHED_2, PUBLISHED_3], ids=["moondream2", "moondream3"])
def test_a_prompt_has_one_space_before_the_object(config):
    prompt = SKILL.prompt(Detect("cat", IMAGE), TOKENIZER, config).tokens
    assert prompt == [*plain([1, 7235, 476, 2]), *words(" cat"), *plain([ANSWER])]
    assert prompt == SKILL.prompt(Detect(" cat ", IMAGE), TOKENIZER, config).tokens


@BOTH
def test_a_box_reaches_half_its_size_to_each_side_of_its_centre(config):
    detect = parser(config)
    assert consume(detect, OBJECT[:2]) == []
    assert consume(detect, [*OBJECT[2:], END]) == [FoundObject(OBJECT_BOX)]
    assert detect.output() == DetectOutput((OBJECT_BOX,))
    assert detect.finish_reason is FinishReason.STOP


def test_the_score_of_a_box_is_the_product_of_those_of_its_tokens():
    detect = parser()
    scored = [token._replace(score=score) for token, score in zip(OBJECT, (0.5, 0.5, 0.25), strict=True)]
    (found,) = consume(detect, [*scored, END])
    assert (found, found.score) == (FoundObject(OBJECT_BOX), 0.0625)
    assert output(detect, DetectOutput).scores == (0.0625,)


def test_objects_below_the_least_score_are_left_out_and_count_towards_the_most():
    def scored(score):
        return [token._replace(score=score if token is OBJECT[0] else 1.0) for token in OBJECT]

    request = Detect("cat", IMAGE, max_objects=4, min_score=0.5)
    detect = SKILL.new_parser(request, TOKENIZER, MOONDREAM_3)
    found = consume(detect, [token for score in (0.25, 0.5, 0.0, 0.75) for token in scored(score)])
    assert [item.score for item in found] == [0.5, 0.75]
    assert detect.output() == DetectOutput((OBJECT_BOX,) * 2)
    assert output(detect, DetectOutput).scores == (0.5, 0.75)
    assert detect.finish_reason is FinishReason.MAX_OBJECTS


@pytest.mark.parametrize("score", [0.1, 0.7, 0.9847, 0.9871, 0.9914])
def test_the_score_of_an_answer_as_the_least_score_keeps_the_object(score):
    """Also with 32 bits, in which some scores become larger."""
    for least, is_found in (
        (score, True),
        (struct.unpack("f", struct.pack("f", score))[0], True),
        (score + 1e-4, False),
    ):
        detect = SKILL.new_parser(Detect("cat", IMAGE, min_score=least), TOKENIZER, MOONDREAM_3)
        factors = zip(OBJECT, (score, 1.0, 1.0), strict=True)
        found = consume(detect, [token._replace(score=factor) for token, factor in factors])
        assert len(found) == is_found, least


def test_an_object_is_x_then_y_then_size_and_the_end_comes_only_between_objects():
    detect = parser()
    for _ in range(3):
        for token, rule in zip(OBJECT, (NEXT_OR_END, Y, EXTENT), strict=True):
            assert detect.rule == rule
            consume(detect, [token])
    assert detect.rule == NEXT_OR_END


@given(st.lists(st.tuples(st.booleans(), fractions, fractions), max_size=40), st.integers(1, 6), st.integers(1, 30))
def test_whatever_the_rules_let_pass_every_complete_object_is_a_box(draws, max_objects, max_tokens):
    detect, num_tokens = parser(max_objects=max_objects, max_tokens=max_tokens), 0
    for ends, width, height in draws:
        if detect.finish_reason is not None:
            break
        assert detect.rule.allowed is not None
        if ends and EOS in detect.rule.allowed:
            consume(detect, [END])
        else:
            kind = detect.rule.allowed[0]
            consume(detect, [Token(kind, (width,) if kind == COORDINATE else (width, height))])
            num_tokens += 1
    boxes = output(detect, DetectOutput).boxes
    assert len(boxes) == num_tokens // 3 <= max_objects
    assert num_tokens <= max_tokens
    for box in boxes:
        assert 0 <= box.x_min <= box.x_max <= 1
        assert 0 <= box.y_min <= box.y_max <= 1


def test_the_last_allowed_object_ends_it():
    detect = parser(max_objects=2)
    consume(detect, [*OBJECT, *OBJECT[:2]])
    assert detect.finish_reason is None
    consume(detect, OBJECT[2:])
    assert detect.finish_reason is FinishReason.MAX_OBJECTS
    assert detect.output() == DetectOutput((OBJECT_BOX, OBJECT_BOX))


def test_there_are_150_objects_unless_the_caller_says_otherwise():
    detect = parser()
    consume(detect, OBJECT * DEFAULT_MAX_OBJECTS)
    assert detect.finish_reason is FinishReason.MAX_OBJECTS


@pytest.mark.parametrize(("max_tokens", "num_boxes"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)])
def test_an_object_that_max_tokens_breaks_off_is_dropped(max_tokens, num_boxes):
    detect = parser(max_tokens=max_tokens)
    consume(detect, (OBJECT * 2)[:max_tokens])
    assert detect.finish_reason is FinishReason.LENGTH
    assert len(output(detect, DetectOutput).boxes) == num_boxes


@pytest.mark.parametrize("begun", [1, 2])
def test_a_cut_drops_an_object_begun(begun):
    detect = parser()
    consume(detect, [*OBJECT, *OBJECT[:begun]])
    assert list(detect.truncate()) == []
    assert detect.finish_reason is FinishReason.LENGTH
    assert detect.output() == DetectOutput((OBJECT_BOX,))


def test_a_box_is_clipped_to_the_image_on_every_side():
    assert box_around(0.0, 1.0, 0.5, 0.5) == Box(0.0, 0.75, 0.25, 1.0)
    assert box_around(1.0, 0.0, 0.5, 0.5) == Box(0.75, 0.0, 1.0, 0.25)
    assert box_around(0.5, 0.5, 1.0, 1.0) == Box(0.0, 0.0, 1.0, 1.0)
