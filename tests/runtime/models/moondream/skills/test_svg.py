import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.models.moondream.skills.svg import UNITS_PER_SIDE, PathWriter

NUM_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
LETTERS = "MmLlHhVvCcSsQqTtAaZz"


def written(words):
    writer = PathWriter()
    pieces = [writer.push(word) for word in words]
    assert "".join(pieces) == writer.path
    return writer


def svg_path(words):
    return written(words).path


def path(text):
    return svg_path(text.split())


def is_partial(text):
    return written(text.split()).is_partial


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("M 0 960 L 480 240 Z", "M 0 1 L 0.5 0.25 Z"),
        ("m 96 96 l 96 0 z", "m 0.1 0.1 l 0.1 0 z"),
        ("M 1 2 H 96 V 192", "M 0.001 0.002 H 0.1 V 0.2"),
        ("M 0 0 h 96 v 192", "M 0 0 h 0.1 v 0.2"),
        ("M 0 0 C 96 192 288 384 480 576", "M 0 0 C 0.1 0.2 0.3 0.4 0.5 0.6"),
        ("M 0 0 S 96 192 288 384", "M 0 0 S 0.1 0.2 0.3 0.4"),
        ("M 0 0 Q 96 192 288 384 T 480 576", "M 0 0 Q 0.1 0.2 0.3 0.4 T 0.5 0.6"),
    ],
)
def test_commands_are_written_with_their_numbers_over_960(words, written):
    assert path(words) == written


def test_a_number_has_three_decimals_and_no_trailing_zeros():
    assert path("M 320 479 L 960 1919") == "M 0.333 0.499 L 1 1.999"


@pytest.mark.parametrize("words", ["M 96 - 192", "M 96 -192"])
def test_a_minus_negates_the_next_number_alone(words):
    assert path(f"{words} L 96 192") == "M 0.1 -0.2 L 0.1 0.2"


def test_zero_has_no_sign():
    assert path("M - 0 -0") == "M 0 0"


def test_an_arc_keeps_its_rotation_and_flags_as_they_are():
    assert path("M 0 0 A 96 192 45 0 1 480 960") == "M 0 0 A 0.1 0.2 45 0 1 0.5 1"
    assert path("M 0 0 a 96 192 - 45 1 0 480 - 96") == "M 0 0 a 0.1 0.2 -45 1 0 0.5 -0.1"


def test_repeated_groups_go_without_their_letter():
    assert path("M 0 0 96 96 192 192") == "M 0 0 0.1 0.1 0.2 0.2"
    assert path("M 0 0 L 96 96 192 192 L 0 0") == "M 0 0 L 0.1 0.1 0.2 0.2 L 0 0"


def test_an_incomplete_last_group_is_dropped():
    assert path("M 0 0 L 96 96 192") == "M 0 0 L 0.1 0.1"
    assert path("M 0 0 L 96 Z") == "M 0 0 Z"
    assert path("M 0 0 C 96 96 96 96 96") == "M 0 0"


@pytest.mark.parametrize("word", ["hello", "M5", "1.5", "5-", "--5", "-M", "²", "٣", "_", "ſ", "MM"])
def test_reading_stops_at_a_word_that_is_neither_letter_nor_integer(word):
    assert path(f"M 0 0 {word} L 96 96") == "M 0 0"


def test_a_minus_before_a_letter_ends_the_path():
    assert path("M 0 0 - L 96 96") == "M 0 0"


def test_a_number_after_a_closed_path_ends_it():
    assert path("M 0 0 Z 96 96 L 96 96") == "M 0 0 Z"


@pytest.mark.parametrize("digits", ["1" * 10, "9" * 400, "0" * 5000])
def test_a_number_without_measure_ends_the_path(digits):
    assert path(f"M 0 0 L 96 {digits} L 96 96") == "M 0 0"


def test_pieces_are_whole_groups_of_arguments():
    writer = PathWriter()
    pieces = [writer.push(word) for word in ["M", "96", "192", "L", "0", "0", "96", "96", "Z"]]
    assert pieces == ["", "", "M 0.1 0.2", "", "", " L 0 0", "", " 0.1 0.1", " Z"]


@pytest.mark.parametrize("words", ["M 0 0 L 96 96 Z", "m 0 0 h - 96", "M 0 0 96 96"])
def test_a_path_of_all_words_is_whole(words):
    assert not is_partial(words)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "L 1 1",
        "M",
        "M 0",
        "M 0 0 x",
        "M 0 0 L",
        "M 0 0 L 96",
        "M 0 0 -",
        "M 0 0 L Z",
        "M 0 0 L 96 Z",
        "M 0 0 Z 5",
    ],
)
def test_a_path_that_lacks_something_is_partial(words):
    assert is_partial(words)


@pytest.mark.parametrize("flags", ["2 0", "0 2", "- 1 0", "0 -1"])
def test_an_arc_whose_flags_are_not_0_or_1_ends_the_path(flags):
    assert path(f"M 0 0 A 96 192 45 {flags} 480 960 L 96 96") == "M 0 0"


@pytest.mark.parametrize("words", ["", "96 96", "nothing", "-", "M", "M 96", "L", "Z", "M Z", "L 96 96", "M L 1 1"])
def test_a_path_that_does_not_begin_with_a_move_is_none(words):
    assert path(words) == ""


def parsed(text):
    """The commands of a path and their numbers; fails where a group of arguments is incomplete."""
    commands = []
    for letter, rest in re.findall(r"([A-Za-z])([^A-Za-z]*)", text):
        numbers = [float(number) for number in rest.split()]
        size = NUM_ARGUMENTS[letter.upper()]
        assert (not numbers and size == 0) or (numbers and len(numbers) % size == 0), text
        if letter in "Aa":
            assert {0, 1}.issuperset(numbers[3::7] + numbers[4::7]), text
        commands.append((letter, numbers))
    assert text == "" or commands[0][0] in "Mm", text
    return commands


some_words = st.lists(
    st.one_of(st.sampled_from(LETTERS), st.integers(-2000, 2000).map(str), st.sampled_from("01-x")), max_size=40
).flatmap(lambda words: st.sampled_from([words, ["M", "1", "2", *words]]))


@given(some_words)
def test_what_is_written_is_always_a_path(words):
    parsed(svg_path(words))


@given(st.integers(0, 2**32 - 1))
def test_every_well_formed_path_comes_back(seed):
    draw = random.Random(seed)
    commands, words = [], []
    for letter in ["M", *draw.choices([letter for letter in LETTERS if letter not in "Aa"], k=8)]:
        groups = draw.randint(1, 3) if letter not in "Zz" else 1
        numbers = [draw.randint(-2000, 2000) for _ in range(groups * NUM_ARGUMENTS[letter.upper()])]
        commands.append((letter, [number / UNITS_PER_SIDE for number in numbers]))
        words += [letter, *map(str, numbers)]
    for (letter, numbers), (wanted_letter, wanted) in zip(parsed(svg_path(words)), commands, strict=True):
        assert letter == wanted_letter
        assert numbers == pytest.approx(wanted, abs=5.1e-4)
