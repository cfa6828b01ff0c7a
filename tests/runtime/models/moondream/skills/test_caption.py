import pytest

from kestrel_runtime.api.events import CaptionOutput, FinishReason
from kestrel_runtime.api.requests import CAPTION_LENGTHS, Caption, SamplingParams
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_TOKENS
from kestrel_runtime.models.moondream.skills.caption import CaptionSkill
from kestrel_runtime.output.output_parser import TokenRule
from tests.runtime.models.moondream.skills.parsing import (
    ANSWER,
    EOS,
    ID_OF_BYTE,
    IMAGE,
    MOONDREAM_2,
    MOONDREAM_3,
    PUBLISHED_2,
    PUBLISHED_3,
    TOKENIZER,
    consume,
    emitted,
    plain,
    spelled,
    words,
)

SKILL = CaptionSkill()
BOTH = pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])


def parser(config=MOONDREAM_3, max_tokens=None, **sampling):
    sampling = SamplingParams(max_tokens=max_tokens, **sampling)
    return SKILL.new_parser(Caption(IMAGE, sampling=sampling), TOKENIZER, config)


@pytest.mark.parametrize("config", [PUBLISHED_2, PUBLISHED_3], ids=["moondream2", "moondream3"])
def test_the_prompt_is_the_template_of_the_length(config):
    middle = {"short": 12492, "normal": 6382, "long": 4059}
    for length in CAPTION_LENGTHS:
        prompt = SKILL.prompt(Caption(IMAGE, length), TOKENIZER, config).tokens
        assert prompt == plain([1, 32708, 2, middle[length], ANSWER])


@BOTH
def test_a_caption_is_the_text_up_to_the_end_token(config):
    caption = parser(config)
    deltas = consume(caption, [*words("a small copy of a bird"), *plain([EOS])])
    assert caption.output() == CaptionOutput("a small copy of a bird")
    assert emitted(deltas) == "a small copy of a bird"
    assert caption.finish_reason is FinishReason.STOP


@BOTH
def test_a_caption_that_ends_at_once_is_empty(config):
    caption = parser(config)
    assert consume(caption, plain([EOS])) == []
    assert caption.output() == CaptionOutput("")
    assert caption.finish_reason is FinishReason.STOP


def test_a_caption_ends_with_its_last_allowed_token():
    caption = parser(max_tokens=4)
    consume(caption, spelled("abc"))
    assert caption.finish_reason is None
    consume(caption, spelled("d"))
    assert caption.finish_reason is FinishReason.LENGTH
    assert caption.output() == CaptionOutput("abcd")


def test_a_caption_has_768_tokens_unless_the_caller_says_otherwise():
    caption = parser()
    consume(caption, spelled("a" * (DEFAULT_MAX_TOKENS - 1)))
    assert caption.finish_reason is None
    consume(caption, spelled("b"))
    assert caption.finish_reason is FinishReason.LENGTH
    assert DEFAULT_MAX_TOKENS == 768


@pytest.mark.parametrize("end", ["end token", "max_tokens", "cut"])
def test_a_character_that_the_end_breaks_off_is_told_as_broken(end):
    caption = parser(max_tokens=2 if end == "max_tokens" else None)
    deltas = consume(caption, [*spelled("a"), *plain([ID_OF_BYTE["é".encode()[0]]])])
    deltas += consume(caption, plain([EOS])) if end == "end token" else []
    deltas += caption.truncate() if end == "cut" else []
    assert emitted(deltas) == "a�"
    assert caption.output() == CaptionOutput("a�")
    assert caption.finish_reason is (FinishReason.STOP if end == "end token" else FinishReason.LENGTH)


def test_moondream_2_may_not_open_a_second_answer_but_for_its_first_token():
    caption = parser(MOONDREAM_2)
    assert caption.rule == TokenRule()
    consume(caption, plain([ANSWER]))
    for token in words("a bird"):
        assert caption.rule == TokenRule(suppressed=(ANSWER,))
        consume(caption, [token])


def test_moondream_3_may_write_what_it_likes():
    caption = parser(MOONDREAM_3)
    for token in words("a bird"):
        assert caption.rule == TokenRule()
        consume(caption, [token])


@pytest.mark.parametrize(("includes", "text"), [(False, "a "), (True, "a bird")])
def test_a_stop_string_ends_a_caption_and_is_named(includes, text):
    caption = parser(stop=("cat", "bird"), include_stop=includes)
    deltas = consume(caption, spelled("a bird"))
    assert emitted(deltas) == text
    assert caption.output() == CaptionOutput(text)
    assert (caption.finish_reason, caption.stop_sequence) == (FinishReason.STOP_SEQUENCE, "bird")


@pytest.mark.parametrize("end", ["end token", "max_tokens", "truncated"])
def test_text_that_was_held_back_comes_when_a_caption_ends_otherwise(end):
    caption = parser(max_tokens=4 if end == "max_tokens" else None, stop=("bird",))
    deltas = consume(caption, spelled("a bi"))
    deltas += consume(caption, plain([EOS])) if end == "end token" else []
    deltas += caption.truncate() if end == "truncated" else []
    assert emitted(deltas) == "a bi"
    assert caption.output() == CaptionOutput("a bi")
    assert caption.finish_reason is (FinishReason.STOP if end == "end token" else FinishReason.LENGTH)
    assert caption.stop_sequence is None


def test_a_stop_string_goes_before_the_last_allowed_token():
    caption = parser(max_tokens=2, stop=("ab",))
    assert emitted(consume(caption, spelled("ab"))) == ""
    assert caption.finish_reason is FinishReason.STOP_SEQUENCE


def test_the_replacement_of_a_broken_character_may_end_a_stop_string():
    caption = parser(stop=("b�",))
    deltas = consume(caption, [*spelled("ab"), *plain([ID_OF_BYTE["é".encode()[0]], EOS])])
    assert emitted(deltas) == "a"
    assert caption.finish_reason is FinishReason.STOP_SEQUENCE
