"""An error that is kept keeps nothing that its frames held."""

import gc
import random
import traceback
import weakref

from kestrel_runtime.api.errors import clear_locals, did_you_mean, drop_tracebacks


class Image:
    """Something large."""


def test_frames_of_an_error_and_of_what_caused_it_let_go_of_their_variables():
    held: list[weakref.ref[Image]] = []

    def decode() -> None:
        image = Image()
        held.append(weakref.ref(image))
        raise ValueError("inner")

    def prepare() -> None:
        image = Image()
        held.append(weakref.ref(image))
        try:
            decode()
        except ValueError as error:
            raise RuntimeError("outer") from error

    kept = None
    try:
        prepare()
    except RuntimeError as error:
        kept = error
    assert kept is not None
    gc.disable()
    try:
        assert [item() is not None for item in held] == [True, True]
        clear_locals(kept)
        assert [item() for item in held] == [None, None]
    finally:
        gc.enable()
    lines = traceback.format_exception(kept)
    assert any("in decode" in line for line in lines)  # the log still says where


def test_errors_that_refer_to_each_other_end_the_search():
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    clear_locals(first)
    drop_tracebacks(first)


def test_a_dropped_traceback_is_gone_all_along_the_chain():
    kept = None
    try:
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        kept = error
    drop_tracebacks(kept)
    assert kept.__traceback__ is None
    assert kept.__cause__ is not None
    assert kept.__cause__.__traceback__ is None


def test_the_word_that_was_meant_is_found_among_many_long_ones():
    letters = random.Random(4)
    words = ["".join(letters.choices("abc/_", k=200)) for _ in range(20_000)]  # comparing all would take minutes
    assert did_you_mean(words[7][:-3], words) == f"; did you mean {words[7]}?"
    assert did_you_mean("x" * 10_000, words) == ""
