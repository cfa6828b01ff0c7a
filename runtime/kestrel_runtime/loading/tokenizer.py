"""Converts text to token ids and back. `output/text_decoder.py` decodes token by token.

Reads a `tokenizer.json` with byte-level BPE. Text of callers never becomes a control token, even if it spells one.
Control tokens decode to an empty text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import tokenizers

from kestrel_runtime.api.errors import CheckpointError

MAX_TOKEN_ID = 2**24
"""Up to it float32 holds every id, as the output of a step does."""
_MAX_ECHO_CHARS = 200


class Tokenizer:
    """Encodes and decodes whole texts. Thread-safe."""

    def __init__(self, library: tokenizers.Tokenizer, bytes_of_token: Sequence[bytes]) -> None:
        self._library = library
        self._bytes_of_token = bytes_of_token

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a `tokenizer.json`. Raises `CheckpointError`."""
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain `Exception`
            reason = " ".join(str(error)[:_MAX_ECHO_CHARS].split())
            raise CheckpointError(f"{path}: cannot be read as a tokenizer: {reason}") from error
        if not isinstance(library.decoder, tokenizers.decoders.ByteLevel):
            kind = type(library.decoder).__name__ if library.decoder is not None else "no"
            raise CheckpointError(f"{path}: has {kind} decoder; only a ByteLevel decoder is served")
        vocabulary = library.get_vocab()
        if (highest_id := max(vocabulary.values(), default=0)) > MAX_TOKEN_ID:
            raise CheckpointError(f"{path}: has a token of id {highest_id}, more than {MAX_TOKEN_ID}")
        library.encode_special_tokens = True
        # A file may contain settings for training, but prompts are neither truncated nor padded.
        library.no_truncation()
        library.no_padding()
        return cls(library, _bytes_of_token(library, vocabulary))

    @property
    def vocab_size(self) -> int:
        return self._library.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of this text, without control tokens before or after it."""
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of these ids.

        Control tokens and unknown ids are skipped, invalid UTF-8 becomes U+FFFD.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of this id in a text: empty for a control token or an unknown id."""
        try:
            return self._bytes_of_token[token]
        except IndexError:
            return b""


def _bytes_of_token(library: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> tuple[bytes, ...]:
    """Returns the bytes of each id."""
    byte_of_character = _byte_of_character()
    control = {id for id, token in library.get_added_tokens_decoder().items() if token.special}
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    for token, id in vocabulary.items():
        if id not in control:
            # An added token may contain characters outside the alphabet. The library then uses its text as it is.
            spelled = [byte_of_character.get(character) for character in token]
            table[id] = bytes(b for b in spelled if b is not None) if None not in spelled else token.encode()
    return tuple(table)


def _byte_of_character() -> dict[str, int]:
    """Returns the byte-level alphabet: visible Latin-1 characters, and U+0100 and on for other bytes."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return alphabet
