"""Compiles constraints, within limits of time and size. Knows the grammar library and no sequences.

Compiling takes some 50 ms of a processor at most for what passes the checks of `Constraint`, and the library holds
no interpreter lock meanwhile. It runs in threads of its own, so that whoever waits for one that the checks have
missed waits for a bounded time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import llguidance

from kestrel_runtime.api.constraints.constraint import Constraint
from kestrel_runtime.api.errors import InvalidRequest, Overloaded, QueueBound, Violation

_NUM_THREADS = 4
_MAX_S = 0.5
"""How long a request waits for its constraint: ten times what it takes on a machine with a free processor."""
_ITEM_SEPARATOR, _KEY_SEPARATOR = ", ", ": "
_ESCAPED = frozenset("\\.+*?()|[]{}^$#&-~/")
_UNUSABLE = "cannot be used: its syntax is wrong, it contradicts itself, or it is too complex"


_Job = tuple[Future[llguidance.LLMatcher], Constraint, llguidance.LLTokenizer]


class ConstraintCompiler:
    """Compiles for any thread. `new_vocabulary` describes the tokens of the model, given the end token."""

    def __init__(self, new_vocabulary: Callable[[int], llguidance.LLTokenizer]) -> None:
        self._new_vocabulary = new_vocabulary
        self._vocabularies: dict[int, llguidance.LLTokenizer] = {}
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._num_threads = 0
        # A mask of an answer takes a few milliseconds at most, and an answer some 20 MB.
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=4_000,
            initial_lexer_fuel=500_000,
            step_lexer_fuel=50_000,
            step_max_items=10_000,
            max_lexer_states=10_000,
            max_grammar_size=50_000,
            precompute_large_lexemes=False,
            verbose_errors=False,
        )

    def compiled(self, constraint: Constraint, end_id: int) -> llguidance.LLMatcher:
        """A matcher at the start of an answer, to be copied for each sequence. `end_id` ends the answer.

        Raises `InvalidRequest` where the constraint cannot be compiled, and `Overloaded` where too many others are.
        """
        vocabulary = self._vocabulary(end_id)
        done: Future[llguidance.LLMatcher] = Future()
        self._jobs.put((done, constraint, vocabulary))
        self._start_thread()
        try:
            compiled = done.result(_MAX_S)
        except TimeoutError:
            if done.cancel():
                raise Overloaded(_NUM_THREADS, _MAX_S, QueueBound.CONSTRAINTS) from None
            raise InvalidRequest((Violation(_field_of(constraint), "takes too long to compile"),)) from None
        except ValueError:  # a text that is not valid Unicode, or JSON of which half a character is
            raise InvalidRequest((Violation(_field_of(constraint), _UNUSABLE),)) from None
        if compiled.is_error():
            raise InvalidRequest((Violation(_field_of(constraint), _UNUSABLE),))
        return compiled

    def _vocabulary(self, end_id: int) -> llguidance.LLTokenizer:
        with self._lock:
            if end_id not in self._vocabularies:
                self._vocabularies[end_id] = self._new_vocabulary(end_id)
            return self._vocabularies[end_id]

    def _start_thread(self) -> None:
        with self._lock:
            number = self._num_threads
            if number == _NUM_THREADS:
                return
            self._num_threads += 1
        threading.Thread(target=self._run, name=f"kestrel-constraints-{number}", daemon=True).start()

    def _run(self) -> None:
        while True:
            done, constraint, vocabulary = self._jobs.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(self._compile(constraint, vocabulary))
                except BaseException as error:  # a panic of the library is no `Exception`
                    done.set_exception(error)
            del done, constraint, vocabulary

    def _compile(self, constraint: Constraint, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
        compiled = llguidance.LLMatcher(vocabulary, _grammar(constraint), log_level=0, limits=self._limits)
        if not compiled.is_error():
            # Some errors show only here, such as a schema that nothing satisfies. Copies keep what this computes.
            compiled.compute_bitmask()
        return compiled


def _grammar(constraint: Constraint) -> str:
    if constraint.json_schema is not None:
        return llguidance.LLMatcher.grammar_from_json_schema(
            constraint.json_schema,
            overrides={
                "item_separator": _ITEM_SEPARATOR,
                "key_separator": _KEY_SEPARATOR,
                "whitespace_flexible": False,
            },
        )
    if constraint.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(constraint.regex)
    return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, constraint.choices)))


def _literal(text: str) -> str:
    """An expression that matches this text alone."""
    return "".join(f"\\{character}" if character in _ESCAPED else character for character in text)


def _field_of(constraint: Constraint) -> str:
    if constraint.json_schema is not None:
        return "constraint.json_schema"
    return "constraint.choices" if constraint.regex is None else "constraint.regex"
