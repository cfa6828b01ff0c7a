import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.api.events import FinishReason, TextChannel, TextDelta, TokenLogprob, TopLogprob
from kestrel_runtime.api.requests import (
    BoxRef,
    Caption,
    Chat,
    ChatMessage,
    Detect,
    Embed,
    Gaze,
    Point,
    PointRef,
    Query,
    Role,
    Segment,
)
from kestrel_runtime.models.moondream.skills import SKILLS
from kestrel_runtime.models.moondream.skills.base import TextEmitter, spatial_tokens, text_tokens
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.output.stop_strings import StopMatcher
from tests.runtime.models.moondream.skills.parsing import (
    COORDINATE,
    ID_OF_BYTE,
    IMAGE,
    MOONDREAM_3,
    REFERENCE_TOKENS,
    REFERENCES,
    SIZE,
    TOKENIZER,
    consume,
    coordinate,
    emitted,
    size,
    words,
)

REQUESTS = {
    "query": Query("what?"),
    "caption": Caption(IMAGE),
    "point": Point("cat", IMAGE),
    "detect": Detect("cat", IMAGE),
    "segment": Segment("cat", IMAGE),
    "gaze": Gaze(IMAGE, PointRef(0.25, 0.75)),
    "chat": Chat((ChatMessage(Role.USER, "what?"),)),
    "embed": Embed(IMAGE),
}
SCRIPTS = {
    "query": words("a bird"),
    "caption": words("a bird"),
    "point": [coordinate(0.5)] * 2,
    "detect": [coordinate(0.5), coordinate(0.5), size(0.5, 0.5)],
    "segment": [coordinate(0.5), coordinate(0.5), size(0.5, 0.5)],
    "gaze": [coordinate(0.5)] * 2,
    "chat": words("a bird"),
}
GENERATING = [name for name in SKILLS if name != "embed"]
some_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
bytes_of_characters = st.text("aé✓🙂 ", max_size=12).map(lambda text: [ID_OF_BYTE[byte] for byte in text.encode()])


def text_emitter():
    return TextEmitter(TOKENIZER, TextChannel.ANSWER)


# The registry


def test_every_kind_of_request_has_its_skill():
    assert SKILLS.keys() == {request.skill for request in REQUESTS.values()}
    assert all(SKILLS[name].name == name for name in SKILLS)


@pytest.mark.parametrize("name", SKILLS)
def test_the_text_that_may_be_too_long_is_a_field_of_the_request(name):
    assert hasattr(REQUESTS[name], SKILLS[name].text_field)


@pytest.mark.parametrize("name", SKILLS)
def test_text_is_drawn_and_places_are_greedy_unless_the_caller_says_otherwise(name):
    wanted = (0.2, 0.9) if name in ("query", "caption", "chat") else (0.0, 1.0)
    defaults = SKILLS[name].defaults
    assert (defaults.temperature, defaults.top_p) == wanted


@pytest.mark.parametrize("name", GENERATING)
def test_an_answer_that_is_truncated_at_once_is_empty(name):
    parser = SKILLS[name].new_parser(REQUESTS[name], TOKENIZER, MOONDREAM_3)
    assert parser.finish_reason is None
    assert list(parser.truncate()) == []
    assert parser.finish_reason is FinishReason.LENGTH
    fields = set(parser.output().__struct_fields__) - {"mask_format"}
    empty = {getattr(parser.output(), field) for field in fields}
    assert empty <= {"", (), None}


@pytest.mark.parametrize("name", GENERATING)
def test_parsers_of_one_skill_do_not_share_what_they_parse(name):
    skill, request = SKILLS[name], REQUESTS[name]
    first, second = (skill.new_parser(request, TOKENIZER, MOONDREAM_3) for _ in range(2))
    before = second.output()
    consume(first, SCRIPTS[name])
    assert first.output() != before
    assert second.finish_reason is None
    assert second.output() == before


# Prompts


def test_a_point_is_two_coordinates_and_a_box_its_centre_and_size():
    assert spatial_tokens(REFERENCES, MOONDREAM_3) == REFERENCE_TOKENS
    assert spatial_tokens((), MOONDREAM_3) == []


def test_an_empty_box_is_still_a_box():
    assert spatial_tokens((BoxRef(0.5, 0.5, 0.5, 0.5),), MOONDREAM_3) == [
        Token(COORDINATE, (0.5,)),
        Token(COORDINATE, (0.5,)),
        Token(SIZE, (0.0, 0.0)),
    ]
    assert len(spatial_tokens((PointRef(0.5, 0.5),), MOONDREAM_3)) == 2


def test_plain_ids_carry_no_value():
    assert text_tokens([3, 1]) == text_tokens((3, 1)) == [Token(3), Token(1)]


# Text


@given(some_ids)
def test_deltas_add_up_to_the_text(ids):
    emitter = text_emitter()
    deltas = [delta for id in ids for delta in emitter.push(Token(id))]
    deltas += emitter.flush()
    assert emitted(deltas) == emitter.text == TOKENIZER.decode(ids)
    assert emitter.num_chars == len(emitter.text)
    assert sum(delta.num_tokens for delta in deltas) <= emitter.num_tokens == len(ids)


@given(bytes_of_characters)
def test_a_delta_holds_whole_characters_however_they_are_spread_over_tokens(ids):
    emitter = text_emitter()
    deltas = [delta for id in ids for delta in emitter.push(Token(id))]
    assert "�" not in emitted(deltas)
    assert [len(delta.text) for delta in deltas] == [1] * len(deltas)
    assert [delta.num_tokens for delta in deltas] == [len(delta.text.encode()) for delta in deltas]
    assert list(emitter.flush()) == []


def test_tokens_without_text_count_towards_the_next_delta():
    emitter = text_emitter()
    assert list(emitter.push(Token(8))) == []
    assert list(emitter.push(Token(ID_OF_BYTE[ord("a")]))) == [TextDelta("a", TextChannel.ANSWER, 0, 2)]
    assert list(emitter.push(Token(ID_OF_BYTE[ord("b")]))) == [TextDelta("b", TextChannel.ANSWER, 2, 1)]
    assert emitter.num_tokens == 3


def test_a_flush_breaks_an_unfinished_character_for_good():
    emitter = text_emitter()
    first, second = (ID_OF_BYTE[byte] for byte in "é".encode())
    deltas = [*emitter.push(Token(first)), *emitter.flush(), *emitter.push(Token(second)), *emitter.flush()]
    assert emitted(deltas) == emitter.text == "��"
    assert emitter.num_chars == 2


# Stop strings

spellings = st.lists(st.text("ab✓é ", min_size=1, max_size=6), min_size=1, max_size=5).map("".join)


def stopping_emitter(*strings, includes_match=False):
    return TextEmitter(TOKENIZER, TextChannel.ANSWER, StopMatcher(strings, includes_match=includes_match))


@given(spellings, st.lists(st.text("ab✓é", min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_a_text_ends_at_a_stop_string_whatever_its_tokens_are(text, strings, includes_match):
    whole = StopMatcher(strings, includes_match=includes_match)
    wanted = whole.push(text) + whole.flush()
    for tokens in (TOKENIZER.encode(text), [ID_OF_BYTE[byte] for byte in text.encode()]):
        emitter = stopping_emitter(*strings, includes_match=includes_match)
        deltas = []
        for id in tokens:
            deltas += emitter.push(Token(id))
            if emitter.stop_sequence is not None:
                break
        deltas += emitter.flush()
        assert emitted(deltas) == emitter.text == wanted
        assert emitter.stop_sequence == whole.matched
        assert emitter.num_chars == len(wanted)


def test_a_delta_counts_the_tokens_of_its_text():
    emitter = stopping_emitter("bcd")
    deltas = [list(emitter.push(Token(ID_OF_BYTE[byte]))) for byte in "aé bcx".encode()]
    pieces = [("a", 0, 1), None, ("é", 1, 2), (" ", 3, 1), None, None, ("bcx", 4, 3)]
    assert deltas == [
        [] if piece is None else [TextDelta(piece[0], TextChannel.ANSWER, *piece[1:])] for piece in pieces
    ]


def test_tokens_of_a_stop_string_count_in_no_delta():
    emitter = stopping_emitter("bc")
    deltas = [delta for byte in b"abc" for delta in emitter.push(Token(ID_OF_BYTE[byte]))]
    assert deltas == [TextDelta("a", TextChannel.ANSWER, 0, 1)]
    assert emitter.stop_sequence == "bc"
    assert list(emitter.flush()) == []
    assert emitter.num_tokens == 3


# Logprobs


def with_logprobs(token_id):
    return Token(token_id, (), -0.5, ((token_id, -0.5), (ID_OF_BYTE[0xC3], -1.5), (8, -2.5)))


@given(spellings, st.lists(st.text("ab✓é", min_size=1, max_size=4), max_size=2))
def test_logprobs_are_those_of_the_tokens_of_each_delta(text, strings):
    stop = StopMatcher(strings) if strings else None
    emitter = TextEmitter(TOKENIZER, TextChannel.ANSWER, stop, 2)
    deltas = []
    for id in (ID_OF_BYTE[byte] for byte in text.encode()):
        deltas += emitter.push(with_logprobs(id))
        if emitter.stop_sequence is not None:
            break
    deltas += emitter.flush()
    assert [len(delta.logprobs) for delta in deltas] == [delta.num_tokens for delta in deltas]
    assert emitter.logprobs == tuple(item for delta in deltas for item in delta.logprobs)
    # With tokens of one byte no token reaches behind the end.
    assert b"".join(item.bytes for item in emitter.logprobs or ()) == emitter.text.encode()


def test_a_token_is_told_with_as_many_of_the_likeliest_as_were_asked_for():
    id = ID_OF_BYTE[ord("a")]
    for count in (0, 1, 2):
        emitter = TextEmitter(TOKENIZER, TextChannel.ANSWER, None, count)
        emitter.push(with_logprobs(id))
        top = (TopLogprob(id, "a", b"a", -0.5), TopLogprob(ID_OF_BYTE[0xC3], "�", b"\xc3", -1.5))[:count]
        assert emitter.logprobs == (TokenLogprob(id, "a", b"a", -0.5, top),)


def test_nothing_is_told_of_logprobs_that_others_of_the_batch_asked_for():
    emitter = text_emitter()
    (delta,) = emitter.push(with_logprobs(ID_OF_BYTE[ord("a")]))
    assert delta.logprobs == ()
    assert emitter.logprobs is None
