"""Ends JSON answers within their tokens, whatever the model would generate.

A schema seldom bounds everything: a model that does not end by itself writes digits, texts and lists until its
tokens are used up, and the answer is not JSON. So the allowed tokens are restricted further; some always remain:

  always                              numbers have the digits of an int64 or a double, and nesting is bounded
  a text is long                      the text ends as soon as it may
  too few tokens for another item     lists and objects end as soon as they may
  tokens for the rest only            texts and numbers do so too, and only required parts are opened
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import llguidance
import numpy as np
from numpy.typing import NDArray

MAX_WHOLE_DIGITS, MAX_FRACTION_DIGITS, MAX_EXPONENT_DIGITS = 18, 17, 2
"""The most digits of a number's parts: every whole number within them is an int64, and every number is a finite
double."""
MAX_NESTING = 16
"""The most lists and objects within each other, unless the schema requires more."""
TEXT_SHARE = 4
"""The divisor of an answer's tokens that gives the longest text, unless the schema has a larger `maxLength`."""
_MAX_DIGITS = (MAX_WHOLE_DIGITS, MAX_FRACTION_DIGITS, MAX_EXPONENT_DIGITS)
_BITS = 32
_MAX_REST_TOKENS = 256
"""The largest rest of an answer that is measured, in tokens: each token takes a mask."""
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_DIGITS, _OPENING, _CLOSING = b"0123456789", b"{[", b"}]"

Mask = NDArray[np.int32]


class JsonTokens:
    """The classes of tokens by their effect in JSON, each a mask: bit t % 32 of word t // 32 stands for token t."""

    def __init__(self, spelled: Sequence[bytes]) -> None:
        """Creates the classes. `spelled` gives the bytes of each token, b"" for those without text."""
        self.spelled = spelled
        self.ends_text = self._of(rb'"[]}]*')
        self.closes = self._of(rb"[]}]+")
        self.opens_object = self._of(rb"\{")
        self.opens_list = self._of(rb"\[")
        self.opens = self._of(rb'[^"]*[\[{].*')
        """Tokens that open a list or object outside of a text. Tokens that end a text first are not included."""
        self.continues_number = self._of(rb"[0-9.eE+-].*")
        self.has_long_exponent = self._of(rb"[0-9.]*[eE][+-]?[0-9]{3,}.*")
        num_digits = np.array([len(text) - len(text.lstrip(_DIGITS)) for text in spelled])
        self.begins_with_digits = [_mask_of(num_digits > least) for least in range(num_digits.max(initial=1))]
        """Tokens by digits: those at index i begin with more than i digits."""

    def _of(self, pattern: bytes) -> Mask:
        matches = re.compile(pattern, re.DOTALL).fullmatch
        return _mask_of(np.array([matches(text) is not None for text in self.spelled]))


def _mask_of(chosen: NDArray[np.bool_]) -> Mask:
    padded = np.pad(chosen, (0, -len(chosen) % _BITS))
    return np.packbits(padded, bitorder="little").view(np.int32)


@dataclass(slots=True)
class JsonAnswer:
    """Tracks the position of an answer in its JSON.

    `max_tokens`: the most tokens of the answer. `rest_tokens`: about as many tokens suffice to end an answer from
    any position. `min_text_tokens`: texts may always have as many.
    """

    tokens: JsonTokens
    max_tokens: int
    rest_tokens: int
    min_text_tokens: int = 0
    num_tokens: int = 0
    is_in_text: bool = False
    _is_escaped: bool = False
    _text_tokens: int = 0
    _number_part: int | None = None
    """The part of the number: 0 before the point, 1 after it, 2 in the exponent; None outside of a number."""
    _num_digits: int = 0
    _item_starts: list[int] = field(default_factory=list[int])
    """The number of tokens before the latest item of each open list and object."""
    _longest_item: int = 0

    def follow(self, token_id: int) -> None:
        """Follows one more token of the answer."""
        self.num_tokens += 1
        text = self.tokens.spelled[token_id]
        if self.is_in_text and not self._is_escaped and _QUOTE not in text and _BACKSLASH not in text:
            self._text_tokens += 1
            return
        was_in_text = self.is_in_text
        for byte in text:
            if self.is_in_text:
                self._follow_text(byte)
            else:
                self._follow_structure(byte)
        self._text_tokens += was_in_text and self.is_in_text

    def _follow_text(self, byte: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif byte == _BACKSLASH:
            self._is_escaped = True
        elif byte == _QUOTE:
            self.is_in_text = False

    def _follow_structure(self, byte: int) -> None:
        if byte in _DIGITS or byte in b"-+":
            if self._number_part is None:
                self._number_part, self._num_digits = 0, 0
            self._num_digits += byte in _DIGITS
        elif self._number_part is not None and byte in b".eE":
            self._number_part, self._num_digits = (1 if byte == ord(".") else 2), 0
        else:
            self._number_part = None
            if byte == _QUOTE:
                self.is_in_text, self._text_tokens = True, 0
            elif byte in _OPENING:
                self._item_starts.append(self.num_tokens)
            elif byte == _COMMA or byte in _CLOSING:
                start = self._item_starts.pop()
                self._longest_item = max(self._longest_item, self.num_tokens - start)
                if byte == _COMMA:
                    self._item_starts.append(self.num_tokens)

    def narrow(self, mask: Mask) -> None:
        """Removes tokens that delay the end of the answer; some tokens always remain."""
        num_left = self.max_tokens - self.num_tokens
        rest_tokens = min(self.rest_tokens, self.max_tokens // 2)
        is_last = num_left <= rest_tokens
        if self.is_in_text:
            longest = max(self.max_tokens // TEXT_SHARE, self.min_text_tokens)
            if (is_last or self._text_tokens >= longest) and not self._is_escaped:
                keep(mask, self.tokens.ends_text)
            return
        remove(mask, self.tokens.has_long_exponent)
        if num_left <= rest_tokens + min(self._longest_item, self.max_tokens // 2):
            keep(mask, self.tokens.closes)
        if is_last or len(self._item_starts) >= MAX_NESTING:
            remove(mask, self.tokens.opens)
        if self._number_part is not None:
            if is_last:
                remove(mask, self.tokens.continues_number)
            num_more = max(0, _MAX_DIGITS[self._number_part] - self._num_digits)
            if num_more < len(self.tokens.begins_with_digits):
                remove(mask, self.tokens.begins_with_digits[num_more])

    def lead(self, mask: Mask) -> None:
        """Keeps only tokens of an answer that opens every optional part and has one item in each list."""
        if not self.is_in_text:
            if self._item_starts and self._item_starts[-1] == self.num_tokens:  # the list or object is still empty
                remove(mask, self.tokens.closes)
            if len(self._item_starts) < MAX_NESTING and (
                keep(mask, self.tokens.opens_object) or keep(mask, self.tokens.opens_list)
            ):
                return
        self.narrow(mask)


def rest_tokens_of(library: llguidance.LLMatcher, tokens: JsonTokens, end_id: int) -> int:
    """Returns about how many tokens suffice to end an answer from any position: those of one that has every part
    once.

    Follows such an answer, spelled in the shortest tokens, for as long as that is cheap.
    """
    answer, library = JsonAnswer(tokens, max_tokens=0, rest_tokens=0), library.deep_copy()
    while answer.num_tokens < _MAX_REST_TOKENS:
        # The library gives a word more than is needed where the vocabulary fills the last one.
        mask = np.frombuffer(library.compute_bitmask(), dtype=np.int32)[: len(tokens.closes)].copy()
        if library.is_error() or mask[end_id // _BITS] >> end_id % _BITS & 1:
            break
        answer.lead(mask)
        word = int(np.flatnonzero(mask)[0])
        token_id = _BITS * word + _lowest_bit(int(mask[word]))
        library.consume_token(token_id)
        answer.follow(token_id)
    return answer.num_tokens


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


def keep(mask: Mask, tokens: Mask) -> bool:
    """Allows only these tokens, if any of them is allowed. Returns True if one is."""
    kept = mask & tokens
    if not kept.any():
        return False
    mask[:] = kept
    return True


def remove(mask: Mask, tokens: Mask) -> None:
    """Removes these tokens, if any other is allowed."""
    kept = mask & ~tokens
    if kept.any():
        mask[:] = kept
