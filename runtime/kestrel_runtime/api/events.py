"""Defines the events of a stream: one `Started`, the answer in pieces, one `Finished`. All are plain values.

The pieces are `TextDelta`s; those of an outline follow its `OutlineBox`. Objects are `FoundObject`s,
one by one. Those of embeddings are `PatchEmbeddings`.

They are structs of msgspec: made without Python code, and sent between processes as they are.
"""

from __future__ import annotations

import builtins
from enum import Enum, auto
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import astuple

_MANY_LOGPROBS = 1_000


class FinishReason(Enum):
    """The reason why generation ended."""

    STOP = auto()
    """The model ended the answer."""
    LENGTH = auto()
    """`max_tokens` or the end of the context was reached."""
    MAX_OBJECTS = auto()
    """`max_objects` was reached."""
    STOP_SEQUENCE = auto()
    """The answer reached one of the request's stop strings."""


class TextChannel(Enum):
    """The text that a delta belongs to."""

    ANSWER = auto()
    REASONING = auto()
    PATH = auto()
    """The SVG path of an outline, in pieces after each of which it is a valid path."""


class _Value(Struct, frozen=True, array_like=True, tag=True):
    """The base of plain values, which cannot be changed."""


class _ScoredValue(_Value, frozen=True, eq=False):
    """The base of values whose last field has scores of the model.

    Equal answers have equal scores within rounding only, so that comparisons leave them out.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and astuple(self)[:-1] == astuple(other)[:-1]

    def __hash__(self) -> int:
        return hash(astuple(self)[:-1])


class Usage(_Value, frozen=True):
    """Token counts. `num_input_tokens` includes BOS and `num_image_tokens`.

    `num_cached_tokens` are those input tokens whose keys and values were in the prefix cache when the request
    started; of a request for embeddings, the image's if they were cached.
    """

    num_input_tokens: int
    num_image_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


class Timing(_Value, frozen=True):
    """The durations of a request's stages, in seconds. `decode_s` runs from the first token to the last."""

    queue_s: float
    """Time in queues: for a preprocessing worker, and later for a row of the batch and pages."""
    preprocess_s: float
    """Time to decode the image and build the prompt."""
    prefill_s: float
    """Time from the start of the request on the device to its first token."""
    time_to_first_token_s: float
    """Time from the submission of the request to its first token."""
    decode_s: float


class Started(_Value, frozen=True):
    """The prompt is in the cache and the first token follows."""

    usage: Usage


class TopLogprob(NamedTuple):
    """A likely token at a position of a text, with its natural logarithm of probability."""

    id: int
    text: str
    """The token's bytes as UTF-8, with U+FFFD for incomplete characters."""
    bytes: builtins.bytes
    logprob: float


class TokenLogprob(NamedTuple):
    """A generated token, and the most likely tokens in its place, the most likely first.

    Probabilities are those of the model: before temperature, penalties, biases and forbidden tokens.
    """

    id: int
    text: str
    bytes: builtins.bytes
    logprob: float
    top: tuple[TopLogprob, ...]


class TextDelta(_Value, frozen=True):
    """The next piece of text. It has whole characters only.

    `token_index` counts the tokens of this channel before the delta, `num_tokens` the tokens of the delta.
    """

    text: str
    channel: TextChannel
    """The text that the piece belongs to."""
    token_index: int
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """Logprobs of the delta's tokens, if the request asks for them."""


class Location(_Value, frozen=True):
    """A place in the image, normalised to [0, 1], origin top left."""

    x: float
    y: float


class Box(_Value, frozen=True):
    """A region of the image, normalised and clipped to [0, 1], origin top left."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


class Grounding(_Value, frozen=True):
    """The places that characters `start_char` to `end_char` (exclusive, in code points) of a text refer to."""

    start_char: int
    end_char: int
    points: tuple[Location, ...]


class Reasoning(_Value, frozen=True):
    """The text of the reasoning before an answer."""

    text: str
    groundings: tuple[Grounding, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Logprobs of the reasoning's tokens; None if the request does not ask for them."""


class QueryOutput(_Value, frozen=True):
    """The answer to a question; `reasoning` is None if the request does not ask for it."""

    answer: str
    reasoning: Reasoning | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Logprobs of the answer's tokens; None if the request does not ask for them."""


class CaptionOutput(_Value, frozen=True):
    """The description of an image."""

    caption: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Logprobs of the caption's tokens; None if the request does not ask for them."""


class PointOutput(_ScoredValue, frozen=True):
    """The places found, in the model's order."""

    points: tuple[Location, ...]
    scores: tuple[float, ...] = ()
    """The score of each place (`FoundObject.score`); empty if the model family makes none."""


class DetectOutput(_ScoredValue, frozen=True):
    """The boxes found, in the model's order."""

    boxes: tuple[Box, ...]
    scores: tuple[float, ...] = ()
    """The score of each box (`FoundObject.score`); empty if the model family makes none."""


class FoundObject(_ScoredValue, frozen=True):
    """One object of the answer, as soon as it is complete."""

    place: Location | Box
    """The place of the object, or the box around it, as the skill finds them."""
    score: float | None = None
    """The confidence of the model in the object, from 0 to 1; None if the model family makes none."""


class OutlineBox(_Value, frozen=True):
    """The box of an outline, whose path follows in pieces."""

    box: Box


class SegmentMask(_Value, frozen=True):
    """One outline: an SVG path whose coordinates run from 0 to 1 over `box`."""

    svg_path: str
    box: Box
    is_partial: bool = False
    """True if the path is incomplete: the model wrote an invalid path, or was stopped before the end of the
    path."""


class SegmentOutput(_Value, frozen=True):
    """The outlines found: none or one."""

    segments: tuple[SegmentMask, ...]
    mask_format: str = "svg"
    """The form of the outline that the caller wants in addition to its path, one of `MASK_FORMATS`."""


class PatchEmbeddings(_Value, frozen=True):
    """The embeddings of some patches of an image, row by row from the top left patch."""

    first_patch: int
    num_patches: int
    data: bytes
    """An embedding after the other, in the request's format, little-endian."""


class EmbedOutput(_Value, frozen=True):
    """The mean of the embeddings of an image's patches. The patches themselves precede it, in pieces."""

    mean: tuple[float, ...]
    num_patches: int


Output = QueryOutput | CaptionOutput | PointOutput | DetectOutput | SegmentOutput | EmbedOutput


class Finished(_Value, frozen=True):
    """The whole answer. The text of a text skill equals the concatenated deltas of each channel."""

    output: Output
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | None = None
    """The stop string that ended the answer; None if generation ended for another reason."""
    image_size_px: tuple[int, int] | None = None
    """Width and height of the upright image, the first of several, to which coordinates are relative; None without
    an image."""
    alternatives: tuple[Finished, ...] = ()
    """Further samples, if a call asks for several. `usage` then has the output tokens of all of them."""

    @property
    def num_decoded(self) -> int:
        """The tokens that were generated in `timing.decode_s`: those of this sample after its first."""
        num_others = sum(other.usage.num_output_tokens for other in self.alternatives)
        return max(0, self.usage.num_output_tokens - num_others - 1)

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores of the objects in this answer and its alternatives."""
        outputs = (each.output for each in (self, *self.alternatives))
        return tuple(
            score for output in outputs if isinstance(output, PointOutput | DetectOutput) for score in output.scores
        )

    @property
    def is_large(self) -> bool:
        """True if rendering the logprobs or the mask takes more than a few milliseconds."""
        if isinstance(self.output, SegmentOutput):
            return self.output.mask_format in ("rle", "png")
        return self.num_logprobs > _MANY_LOGPROBS

    @property
    def num_logprobs(self) -> int:
        """The number of tokens with a logprob: the generated ones, and the most likely ones in their places."""
        count = 0
        for each in (self, *self.alternatives):
            if isinstance(output := each.output, QueryOutput):
                count += _num_logprobs(output.logprobs)
                count += 0 if output.reasoning is None else _num_logprobs(output.reasoning.logprobs)
            elif isinstance(output, CaptionOutput):
                count += _num_logprobs(output.logprobs)
        return count


def _num_logprobs(tokens: tuple[TokenLogprob, ...] | None) -> int:
    return len(tokens) * (1 + len(tokens[0].top)) if tokens else 0  # each token of an answer has as many


Piece = TextDelta | OutlineBox | FoundObject | PatchEmbeddings
TextEvent = Started | TextDelta | Finished
"""The events of a request whose answer is text."""
Event = TextEvent | OutlineBox | FoundObject | PatchEmbeddings
