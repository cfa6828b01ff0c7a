import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.output.stop_strings import StopMatcher

letters = st.text("abé", max_size=30)
stops = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=5)


def run(pieces, strings, *, includes_match=False):
    """What comes of a text in pieces: the results of `push`, that of `flush`, and the string found."""
    matcher = StopMatcher(strings, includes_match=includes_match)
    given_out = [matcher.push(piece) for piece in pieces]
    return given_out, matcher.flush(), matcher.matched


def cut_by_definition(text, strings):
    """The text before the first string that is complete, and that string; the longest of several."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(letters, max_size=6), stops, st.booleans())
def test_the_text_ends_where_the_definition_says_however_it_is_divided(pieces, strings, includes_match):
    given_out, rest, matched = run(pieces, strings, includes_match=includes_match)
    text, stop = cut_by_definition("".join(pieces), strings)
    assert matched == stop
    assert "".join(given_out) + rest == text + (stop or "" if includes_match else "")


@given(letters, stops)
def test_what_is_held_back_is_the_longest_beginning_of_a_string(text, strings):
    matcher = StopMatcher(strings)
    given_out = ""
    for character in text:
        given_out += matcher.push(character)
        if matcher.matched is not None:
            return
    held = max(
        (string[:count] for string in strings for count in range(len(string)) if text.endswith(string[:count])),
        key=len,
    )
    assert text[len(given_out) :] == held


@pytest.mark.parametrize(
    ("text", "strings", "wanted", "matched"),
    [
        ("abcd", ["cd", "bcde"], "ab", "cd"),
        ("abcde", ["bcde", "cde"], "a", "bcde"),
        ("ababac", ["abac"], "ab", "abac"),
        ("aaab", ["aab"], "a", "aab"),
        ("no end", ["End"], "no end", None),
        ("a✓b", ["✓"], "a", "✓"),
    ],
)
def test_overlapping_strings(text, strings, wanted, matched):
    for pieces in ([text], list(text)):
        given_out, rest, found = run(pieces, strings)
        assert ("".join(given_out) + rest, found) == (wanted, matched)


def test_nothing_comes_after_the_string():
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("c") == matcher.flush() == ""
