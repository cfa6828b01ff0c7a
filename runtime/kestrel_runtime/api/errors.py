"""Defines the errors of the engine, independent of any transport.

KestrelError
├── InvalidRequest          the caller's input; carries every violation
│   ├── ImageError          the image's bytes: undecodable or too large
│   └── ContextLengthExceeded
├── ModelNotFound           no model of that name is served
├── AdapterNotFound         no adapter of that name
├── AdapterInvalid          its files do not fit the model; carries every problem
├── SkillUnsupported        the model has no such skill
├── Overloaded              the queue is full, or the wait would be too long
├── RequestRefused          this very request broke the engine before
├── ConstraintFailed        the answer's constraint took too much work, or could not be followed
├── NumbersOverflowed       numbers of the model overflowed while it computed the answer
├── AnswerOutsideSchema     the complete answer has a value that its schema does not allow
├── QueueTimeout            waited longer than the caller allows
├── DeadlineExceeded        the caller's deadline passed
├── EngineUnavailable       starting, draining or dead
├── InternalError           our own bug; its cause is for the log, not for callers
└── CheckpointError         a checkpoint that cannot be found, read or served
"""

from __future__ import annotations

import difflib
import heapq
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a request's contract. `field` is a path such as `sampling.temperature`."""

    field: str
    description: str


_MAX_COMPARED_CHARS, _MAX_COMPARED_WORDS = 48, 32
_MAX_SHOWN_MESSAGES = 8
"""The most messages of a conversation whose tokens an error lists."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: the known word that is most similar, or "".

    Takes a few milliseconds at most: of many words, only those with the same first letter and the most similar
    length are compared, and long words are compared by their beginning alone.
    """
    nearest = heapq.nsmallest(
        _MAX_COMPARED_WORDS, words, key=lambda known: (known[:1] != word[:1], abs(len(known) - len(word)))
    )
    beginnings = {known[:_MAX_COMPARED_CHARS]: known for known in reversed(nearest)}
    close = difflib.get_close_matches(word[:_MAX_COMPARED_CHARS], list(beginnings), n=1)
    return f"; did you mean {beginnings[close[0]]}?" if close else ""


class KestrelError(Exception):
    """The root of all errors that the engine raises on purpose."""


class InvalidRequest(KestrelError):
    """The request breaks its contract; `violations` lists every breach, in field order."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{item.field}: {item.description}" for item in violations))
        self.violations = violations

    def rename(self, name: Callable[[str], str]) -> None:
        """Replaces the path of the field of each violation by what `name` returns for it."""
        self.violations = tuple(Violation(name(item.field), item.description) for item in self.violations)


class ImageError(InvalidRequest):
    """The image in `field` cannot be used. `too_large` distinguishes a size limit from bytes that do not decode."""

    def __init__(self, description: str, *, too_large: bool = False, field: str = "image") -> None:
        super().__init__((Violation(field, description),))
        self.too_large = too_large


class ContextLengthExceeded(InvalidRequest):
    """The prompt and its images fill the context, so that no token can be generated.

    `message_tokens` are the tokens of each message of a conversation, with its images.
    """

    def __init__(
        self, field: str, num_prompt_tokens: int, max_context_tokens: int, message_tokens: Sequence[int] = ()
    ) -> None:
        text = f"the prompt takes {num_prompt_tokens} tokens and must stay below {max_context_tokens}"
        largest = sorted(range(len(message_tokens)), key=lambda index: -message_tokens[index])[:_MAX_SHOWN_MESSAGES]
        if largest:
            of_each = ", ".join(f"{field}[{index}] takes {message_tokens[index]}" for index in sorted(largest))
            text += f"; {'the largest are ' if len(message_tokens) > len(largest) else ''}{of_each}"
        super().__init__((Violation(field, text),))
        self.num_prompt_tokens = num_prompt_tokens
        self.max_context_tokens = max_context_tokens
        self.message_tokens = tuple(message_tokens)


class ModelNotFound(KestrelError):
    """The request names a model that this engine does not serve."""

    def __init__(self, model: str, hint: str = "") -> None:
        """Creates the error. `hint`: the end of the message, such as the name that was probably meant."""
        super().__init__(f"no model named {model!r}{hint}")
        self.model = model
        self.hint = hint


class AdapterNotFound(KestrelError):
    """There is no adapter of this name, or the server uses no adapters."""

    def __init__(self, name: str, hint: str = "") -> None:
        """Creates the error. `hint`: the end of the message, such as the name that was probably meant."""
        super().__init__(name, hint)
        self.name = name
        self.hint = hint

    def __str__(self) -> str:
        return f"no adapter named {self.name!r}{self.hint}"


class AdapterInvalid(KestrelError):
    """The files of an adapter cannot be used; `problems` lists every reason that was found."""

    def __init__(self, name: str, problems: tuple[str, ...]) -> None:
        super().__init__(name, problems)
        self.name = name
        self.problems = problems

    def __str__(self) -> str:
        return f"adapter {self.name!r} cannot be used: {'; '.join(self.problems)}"


class SkillUnsupported(KestrelError):
    """The model has no prompt template for this skill."""

    def __init__(self, skill: str, model: str) -> None:
        super().__init__(f"model {model!r} has no skill {skill!r}")
        self.skill = skill
        self.model = model


class QueueBound(Enum):
    """The bound that keeps a request out of the queue; the value is its name in messages."""

    REQUESTS = "requests"
    IMAGE_BYTES = "bytes of images"
    TOKENS = "tokens"
    CONSTRAINTS = "constraints"
    """Constraints that are being compiled."""
    WAIT = "seconds of waiting"
    """The expected wait is longer than the caller's deadline or `max_queue_s`."""


class Overloaded(KestrelError):
    """The queue is full. `bound` names the exceeded limit, `retry_after_s` estimates when to try again, in seconds.

    `limit` is the value of the limit for all requests together; with `is_tenant_share` the tenant has exceeded its
    share of it. For `QueueBound.WAIT` it is the wait limit of the request, and `retry_after_s` is the expected
    wait.
    """

    def __init__(
        self,
        limit: float,
        retry_after_s: float,
        bound: QueueBound = QueueBound.REQUESTS,
        *,
        is_tenant_share: bool = False,
    ) -> None:
        if bound is QueueBound.WAIT:
            text = f"the wait is about {retry_after_s:.1f} s, longer than the {limit:.1f} s allowed"
        elif is_tenant_share:
            text = f"the caller's share of the queue is full: {limit:.0f} {bound.value} may wait in all"
        else:
            text = f"the queue is full: {limit:.0f} {bound.value} may wait in all"
        super().__init__(text)
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.bound = bound
        self.is_tenant_share = is_tenant_share


class RequestRefused(KestrelError):
    """An equal request made the engine fail before, so the engine refuses this one."""


class ConstraintFailed(KestrelError):
    """The answer cannot continue under its constraint: finding the next token takes too much work."""


class NumbersOverflowed(KestrelError):
    """Numbers of the model, or of the request's adapter, are too large to compute the answer.

    `adapter` is the request's adapter, "" where it has none.
    """

    def __init__(self, adapter: str = "") -> None:
        super().__init__(f"numbers overflow{f' with adapter {adapter!r}' if adapter else ''}")
        self.adapter = adapter


class AnswerOutsideSchema(KestrelError):
    """The complete answer has a number, or another value, that its schema does not allow."""

    def __init__(self, place: str) -> None:
        """Creates the error. `place`: the JSON pointer of the value within the answer."""
        super().__init__(f"the answer has a value at {place or 'its root'} that its schema does not allow")
        self.place = place


class QueueTimeout(KestrelError):
    """The request waited longer than its `max_queue_s` before it could start."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"waited {waited_s:.3f} s in the queue")
        self.waited_s = waited_s


class DeadlineExceeded(KestrelError):
    """The request's deadline passed before its answer was complete."""


class EngineUnavailable(KestrelError):
    """The engine takes no requests: it is starting, draining, closed, or died."""


class InternalError(KestrelError):
    """A request met a bug of the engine; `__cause__` is the original exception."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("internal error")
        self.__cause__ = cause


class CheckpointError(KestrelError):
    """A checkpoint cannot be found, read, or matched to the model; the message says which part and why."""


# Errors that are kept for a while must not keep what the code that raised them was working on: images, tensors.


def clear_locals(error: BaseException) -> None:
    """Drops the local variables of all frames that raised `error` or an error that led to it.

    Lines and functions stay, for logs. A frame that is still running keeps its variables.
    """
    for item in _chain(error):
        traceback.clear_frames(item.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Drops the tracebacks of `error` and of the errors that led to it, for errors whose message is sufficient."""
    for item in _chain(error):
        item.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and those that led to it, each once."""
    met: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        item = waiting.pop()
        if item is not None and id(item) not in met:
            met.add(id(item))
            waiting += [item.__cause__, item.__context__]
            yield item
