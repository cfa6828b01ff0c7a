"""Decodes a text token by token, so that no piece of a streamed answer ends within a UTF-8 character."""

from __future__ import annotations

import codecs
from collections.abc import Callable

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextDecoder:
    """Turns one stream of tokens into characters, each as soon as its last byte has come.

    The results of `push` and `flush`, joined, equal `Tokenizer.decode` of the same ids. The time per token does not
    depend on its position.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` returns the bytes of an id, as `Tokenizer.token_bytes` does."""
        self._token_bytes = token_bytes
        self._utf8: codecs.IncrementalDecoder | None = None  # until a text is not ASCII
        self._is_within = False
        """True within a character: some of its bytes have come."""

    def push(self, token: int) -> str:
        """Returns the characters that this token completes, possibly none."""
        data = self._token_bytes(token)
        if not self._is_within and data.isascii():  # most often
            return data.decode()
        utf8 = self._utf8 = self._utf8 or _Utf8Decoder(errors="replace")
        text = utf8.decode(data)
        self._is_within = bool(utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Ends the text: returns U+FFFD for an incomplete character, else an empty text."""
        if not self._is_within or self._utf8 is None:
            return ""
        self._is_within = False
        return self._utf8.decode(b"", final=True)
