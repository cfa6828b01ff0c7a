"""Turns the embeddings of an image that a step has read into the pieces and the output of its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kestrel_runtime.api.events import EmbedOutput, FinishReason, PatchEmbeddings, Piece
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule

_PIECE_BYTES = 256 * 2**10
"""The most bytes of a piece: sending one delays no other caller for long."""


class EmbeddingForm(NamedTuple):
    """The form in which a request wants embeddings."""

    patches: bool
    """True for those of all patches in addition to their mean."""
    normalize: bool
    """True to scale the mean, and each patch, to the length 1."""
    dtype: str
    """The format of the patches: float16 or float32."""


class ImageEmbeddings(NamedTuple):
    """The embeddings of an image on the host."""

    mean: tuple[float, ...]
    num_patches: int
    patches: bytes
    """The embeddings of all patches, little-endian; empty unless the request wants them."""
    is_finite: bool
    """False if a number is too large for the format, or the model's numbers overflow."""


class EmbeddingParser(OutputParser):
    """The parser of a sequence that generates no tokens, but reads the embeddings of its image in `form`."""

    grammar = Grammar((GrammarState(TokenRule(), 0),))

    def __init__(self, form: EmbeddingForm) -> None:
        self.form = form
        self._output: EmbedOutput | None = None

    def take(self, embeddings: ImageEmbeddings) -> Sequence[Piece]:
        """Takes the embeddings, which end the answer; returns the pieces that hold the patches."""
        self._output = EmbedOutput(embeddings.mean, embeddings.num_patches)
        self.finish_reason = FinishReason.STOP
        data = embeddings.patches
        if not data:
            return ()
        row_bytes = len(data) // embeddings.num_patches
        rows_at_once = max(1, _PIECE_BYTES // row_bytes)
        pieces: list[Piece] = []
        for first in range(0, embeddings.num_patches, rows_at_once):
            num_rows = min(rows_at_once, embeddings.num_patches - first)
            pieces.append(
                PatchEmbeddings(first, num_rows, data[first * row_bytes : (first + num_rows) * row_bytes])
            )
        return pieces

    def parse(self, token: Token) -> Sequence[Piece]:
        raise AssertionError("no token is sampled for embeddings")

    def output(self) -> EmbedOutput:
        assert self._output is not None, "asked for once they are read"
        return self._output
