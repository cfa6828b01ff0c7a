import random
import re

import pytest

from kestrel_runtime.api.events import (
    Box,
    FinishReason,
    OutlineBox,
    SegmentMask,
    SegmentOutput,
    TextChannel,
    TextDelta,
)
from kestrel_runtime.api.requests import MASK_FORMATS, SamplingParams, Segment
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_TOKENS
from kestrel_runtime.models.moondream.skills.segment import SegmentSkill
from kestrel_runtime.output.output_parser import Token, TokenRule
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
    emitted,
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
    """What is found; checks that the pieces add up to it."""
    segment = parser()
    pieces = list(consume(segment, tokens))
    found = output(segment, SegmentOutput).segments
    assert [piece for piece in pieces if isinstance(piece, OutlineBox)] == [OutlineBox(mask.box) for mask in found]
    assert emitted(pieces[1:], TextChannel.PATH) == "".join(mask.svg_path for mask in found)
    return found


def test_a_prompt_has_no_space_before_the_object():
    prompt = SKILL.prompt(Segment("cat", IMAGE), TOKENIZER, PUBLISHED_3).tokens
    assert prompt == [*plain([1, 17374, 2]), *words("cat"), *plain([ANSWER])]
    assert prompt == SKILL.prompt(Segment(" cat ", IMAGE), TOKENIZER, PUBLISHED_3).tokens
    assert words("cat") != words(" cat")


def test_references_stand_before_the_object():
    prompt = SKILL.prompt(Segment("cat", IMAGE, spatial_refs=REFERENCES), TOKENIZER, PUBLISHED_3).tokens
    assert prompt == [*plain([1, 17374, 2]), *REFERENCE_TOKENS, *words("cat"), *plain([ANSWER])]


def test_an_outline_is_a_box_and_a_path_over_it():
    segment = parser()
    consume(segment, [*BOX_TOKENS, *spelled("M00L95Z"), END])
    assert segment.output() == SegmentOutput((SegmentMask("M 0 0 L 0.009 0.005 Z", BOX),))
    assert segment.finish_reason is FinishReason.STOP


def test_the_box_comes_first_and_then_the_path_command_by_command():
    segment = parser()
    assert list(consume(segment, BOX_TOKENS)) == [OutlineBox(BOX)]
    assert consume(segment, [*spelled("M00L95Z"), END]) == [
        TextDelta("M 0 0", TextChannel.PATH, 0, 3),
        TextDelta(" L 0.009 0.005", TextChannel.PATH, 3, 3),
        TextDelta(" Z", TextChannel.PATH, 6, 1),
    ]


def test_a_path_waits_for_its_box():
    pieces = [OutlineBox(BOX), TextDelta("M 0.001 0.002", TextChannel.PATH, 0, 3)]
    assert consume(parser(), [*spelled("M12"), *BOX_TOKENS]) == pieces


def test_every_token_is_a_word_of_its_own():
    assert outlines([*BOX_TOKENS, *spelled("M12")])[0].svg_path == "M 0.001 0.002"


def test_a_minus_negates_the_number_of_the_next_token():
    assert outlines([*BOX_TOKENS, *spelled("m5-9")])[0].svg_path == "m 0.005 -0.009"


def test_spaces_and_control_tokens_are_no_words():
    tokens = [*spelled("M"), *plain([8, 12]), *spelled(" 1\n2"), *plain([15])]
    assert outlines([*BOX_TOKENS, *tokens])[0].svg_path == "M 0.001 0.002"


def test_an_unknown_word_ends_the_path_and_keeps_what_came_before():
    assert outlines([*BOX_TOKENS, *spelled("M12x34"), END]) == (SegmentMask("M 0.001 0.002", BOX, True),)


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
    assert outlines([*BOX_TOKENS, END]) == (SegmentMask("", BOX, True),)


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
    assert segment.output() == SegmentOutput((SegmentMask("M 0.001 0.002", BOX, True),))


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
    assert segment.output() == SegmentOutput((SegmentMask("M 0.001 0.002", BOX, True),))


NUMBER, FLAG = r" -?\d+(?:\.\d+)?", " [01]"
ARC = f"(?:{NUMBER * 3}{FLAG * 2}{NUMBER * 2})+"
PAIRS = {"L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2}
COMMANDS = [rf"[{letter + letter.lower()}](?:{NUMBER * count})+" for letter, count in PAIRS.items()]
MOVE = f"[Mm](?:{NUMBER * 2})+"
SVG_PATH = re.compile(f"(?:{MOVE}(?: (?:{'|'.join([*COMMANDS, MOVE, f'[Aa]{ARC}', '[Zz]'])}))*)?")
"""The grammar of path data, in the spacing that is written here."""


def hostile(chance):
    """Tokens that a broken or malicious model might generate, without the end token: noise, or a damaged path."""
    kinds = [
        spelled("MmLlHhVvCcSsQqTtAaZz"),
        spelled("0123456789"),
        [token for number in (10, 96, 480, 959, 960) for token in words(str(number))],
        spelled("01"),
        spelled("- .,eE+#"),
        plain(range(1, 12)),
        plain(range(1, TOKENIZER.vocab_size)),
        [coordinate(value) for value in (0.0, 0.3, 1023 / 1024, 1.0)],
        [size(*sides) for sides in ((2**-10, 1.0), (1.0, 2**-10), (0.7, 0.2))],
    ]
    weights = [chance.random() ** 2 for _ in kinds]
    noise = [chance.choice(kind) for kind in chance.choices(kinds, weights, k=chance.randrange(120))]
    if chance.random() < 0.5:
        return noise if chance.random() < 0.5 else [*BOX_TOKENS, *noise]
    tokens = [*BOX_TOKENS, *spelled("M12")]
    for _ in range(chance.randrange(12)):
        letter, count = chance.choice([*PAIRS.items(), ("Z", 0)])
        tokens += spelled(chance.choice([letter, letter.lower()]))
        tokens += [chance.choice(kinds[1]) for _ in range(count * chance.randint(1, 3))]
    for token in noise[: chance.choice([0, 0, 1, 2, 5])]:
        tokens.insert(chance.randrange(len(tokens)), token)
    return tokens


@pytest.mark.parametrize("form", MASK_FORMATS)
def test_the_form_of_an_outline_stays_with_it(form):
    request = Segment("cat", IMAGE, mask_format=form)
    outline = SKILL.new_parser(request, TOKENIZER, MOONDREAM_3)
    assert output(outline, SegmentOutput).mask_format == form
    consume(outline, BOX_TOKENS)
    assert output(outline, SegmentOutput).mask_format == form


def test_500_hostile_answers_end_in_valid_outlines_that_say_what_they_lack():
    num_whole = num_partial = num_nothing = 0
    for seed in range(500):
        chance = random.Random(seed)
        tokens = hostile(chance)
        segment = parser(max_tokens=chance.choice([None, 5, 40]))
        path, boxes = "", []
        for token in tokens:
            for piece in segment.consume(token):
                if isinstance(piece, OutlineBox):
                    assert path == ""
                    boxes.append(piece.box)
                else:
                    assert boxes
                    assert isinstance(piece, TextDelta)
                    path += piece.text
                    assert SVG_PATH.fullmatch(path), (seed, path)
            if segment.finish_reason is not None:
                break
        else:
            _ = segment.truncate() if chance.random() < 0.2 else segment.consume(END)
        found = output(segment, SegmentOutput).segments
        assert [mask.box for mask in found] == boxes
        if not found:
            assert path == ""
            num_nothing += 1
            continue
        (mask,) = found
        assert mask.svg_path == path
        assert 0.0 <= mask.box.x_min <= mask.box.x_max <= 1.0
        assert 0.0 <= mask.box.y_min <= mask.box.y_max <= 1.0
        assert mask.is_partial == (segment.finish_reason is FinishReason.LENGTH or not is_whole(tokens, path)), seed
        num_partial += mask.is_partial
        num_whole += not mask.is_partial
    assert min(num_whole, num_partial, num_nothing) > 10, (num_whole, num_partial, num_nothing)


def is_whole(tokens, path):
    """Whether every letter and number of an answer is in its path."""
    texts = [TOKENIZER.decode([token.id]).strip() for token in tokens if not token.value]
    texts = [text for text in texts if text]
    return path != "" and texts[-1] != "-" and len(path.split()) == sum(text != "-" for text in texts)
