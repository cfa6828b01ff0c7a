import pytest

from kestrel_runtime.api.events import Box, FinishReason, SegmentMask, SegmentOutput
from kestrel_runtime.api.requests import SamplingParams, Segment
from kestrel_runtime.interfaces.tokens import Token, TokenRule
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_TOKENS
from kestrel_runtime.models.moondream.skills.segment import SegmentSkill
from tests.runtime.models.moondream.skills.parsing import (
    ANSWER,
    EOS,
    IMAGE,
    MOONDREAM_3,
    PUBLISHED_3,
    REFERENCE_TOKENS,
    REFERENCES,
    TOKENIZER,
    consume,
    coordinate,
    output,
    plain,
    size,
    spelled,
    words,
)

SKILL = SegmentSkill()
END = Token(EOS)
BOX_TOKENS = [coordinate(0.5), coordinate(0.25), size(0.5, 0.25)]
BOX = Box(0.25, 0.125, 0.75, 0.375)


def parser(max_tokens=None):
    request = Segment("cat", IMAGE, sampling=SamplingParams(max_tokens=max_tokens))
    return SKILL.new_parser(request, TOKENIZER, MOONDREAM_3)


def outlines(tokens):
    segment = parser()
    assert consume(segment, tokens) == []
    return output(segment, SegmentOutput).segments


def test_a_prompt_has_no_space_before_the_object():
    prompt = SKILL.prompt(Segment("cat", IMAGE), TOKENIZER, PUBLISHED_3)
    assert prompt == [*plain([1, 17374, 2]), *words("cat"), *plain([ANSWER])]
    assert prompt == SKILL.prompt(Segment(" cat ", IMAGE), TOKENIZER, PUBLISHED_3)
    assert words("cat") != words(" cat")


def test_references_stand_before_the_object():
    prompt = SKILL.prompt(Segment("cat", IMAGE, spatial_refs=REFERENCES), TOKENIZER, PUBLISHED_3)
    assert prompt == [*plain([1, 17374, 2]), *REFERENCE_TOKENS, *words("cat"), *plain([ANSWER])]


def test_an_outline_is_a_box_and_a_path_over_it():
    segment = parser()
    assert consume(segment, [*BOX_TOKENS, *spelled("M00L95Z"), END]) == []
    assert segment.output() == SegmentOutput((SegmentMask("M 0 0 L 0.009 0.005 Z", BOX),))
    assert segment.finish_reason is FinishReason.STOP


def test_every_token_is_a_word_of_its_own():
    assert outlines([*BOX_TOKENS, *spelled("M12")])[0].svg_path == "M 0.001 0.002"


def test_a_minus_negates_the_number_of_the_next_token():
    assert outlines([*BOX_TOKENS, *spelled("m5-9")])[0].svg_path == "m 0.005 -0.009"


def test_spaces_and_control_tokens_are_no_words():
    tokens = [*spelled("M"), *plain([8, 12]), *spelled(" 1\n2"), *plain([15])]
    assert outlines([*BOX_TOKENS, *tokens])[0].svg_path == "M 0.001 0.002"


def test_an_unknown_word_ends_the_path_and_keeps_what_came_before():
    assert outlines([*BOX_TOKENS, *spelled("M12x34"), END]) == (SegmentMask("M 0.001 0.002", BOX),)


def test_the_first_box_counts():
    later = [coordinate(0.9), coordinate(0.9), size(0.1, 0.1)]
    assert outlines([*BOX_TOKENS, *spelled("M1"), *later, *spelled("2")]) == (SegmentMask("M 0.001 0.002", BOX),)


def test_a_box_is_clipped_to_the_image():
    tokens = [coordinate(0.0), coordinate(1.0), size(0.5, 0.5)]
    assert outlines([*tokens, *spelled("M12")])[0].box == Box(0.0, 0.75, 0.25, 1.0)


@pytest.mark.parametrize(
    "tokens",
    [[], BOX_TOKENS[:1], BOX_TOKENS[:2], BOX_TOKENS[2:], [BOX_TOKENS[0], BOX_TOKENS[2]]],
    ids=["nothing", "x", "no size", "no centre", "no y"],
)
def test_without_a_whole_box_there_is_no_outline(tokens):
    assert outlines([*tokens, *spelled("M12"), END]) == ()


def test_a_box_without_a_path_is_still_emitted():
    assert outlines([*BOX_TOKENS, END]) == (SegmentMask("", BOX),)


def test_the_model_may_write_what_it_likes_and_places_are_read_throughout():
    segment = parser()
    for token in (*BOX_TOKENS, *spelled("M12")):
        assert segment.rule == TokenRule(is_spatial=True)
        consume(segment, [token])


def test_an_outline_ends_with_its_last_allowed_token():
    segment = parser(max_tokens=6)
    consume(segment, [*BOX_TOKENS, *spelled("M1")])
    assert segment.finish_reason is None
    consume(segment, spelled("2"))
    assert segment.finish_reason is FinishReason.LENGTH
    assert segment.output() == SegmentOutput((SegmentMask("M 0.001 0.002", BOX),))


def test_an_outline_has_768_tokens_unless_the_caller_says_otherwise():
    segment = parser()
    consume(segment, spelled("1" * (DEFAULT_MAX_TOKENS - 1)))
    assert segment.finish_reason is None
    consume(segment, spelled("1"))
    assert segment.finish_reason is FinishReason.LENGTH


def test_a_cut_keeps_the_path_so_far():
    segment = parser()
    consume(segment, [*BOX_TOKENS, *spelled("M12L3")])
    assert list(segment.truncate()) == []
    assert segment.finish_reason is FinishReason.LENGTH
    assert segment.output() == SegmentOutput((SegmentMask("M 0.001 0.002", BOX),))
