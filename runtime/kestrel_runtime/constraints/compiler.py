"""Compiles constraints with the grammar library, within limits of time and size.

The library limits the work of a mask, but not its search for forced text, so that search is disabled. Then all work
is limited: for a constraint that passes the checks of `Constraint`, compiling takes about 100 ms of a processor at
most, and a mask about 2 ms.

Compiling holds no interpreter lock. It runs in separate threads, of which a tenant has half at most, so that a
constraint that exceeds the expected time delays no other tenant, and every wait is bounded. Nor has a tenant more
threads than half of the processors, at least one, so that steps of the engine do not wait for a processor.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import llguidance

from kestrel_runtime.api.constraints import Constraint, parse_schema
from kestrel_runtime.api.errors import InvalidRequest, Overloaded, QueueBound, Violation
from kestrel_runtime.constraints.answer_check import AnswerCheck
from kestrel_runtime.constraints.exact_grammar import NotExpressibleError, exact_rules
from kestrel_runtime.constraints.json_answer import JsonTokens, rest_tokens_of
from kestrel_runtime.constraints.library_errors import cause_of, located
from kestrel_runtime.constraints.library_schema import library_schema
from kestrel_runtime.constraints.masks import CompiledConstraint
from kestrel_runtime.fairness.fair_turns import FairTurns
from kestrel_runtime.loading.tokenizer import Tokenizer

_NUM_THREADS = 4
_THREADS_PER_TENANT = 2
_MAX_S = 1.0
"""The longest wait for a compiled constraint, in seconds: ten times its duration on an idle processor."""
_NOTHING_IS_FORCED = '%llguidance {"no_forcing": true}\n'
_JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ESCAPED = frozenset("\\.+*?()|[]{}^$#&-~/")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model. `end_id` ends an answer."""

    library: llguidance.LLTokenizer
    json: JsonTokens
    end_id: int


class _Job(NamedTuple):
    done: Future[CompiledConstraint]
    constraint: Constraint
    vocabulary: Vocabulary
    tenant: str


class ConstraintCompiler:
    """Compiles constraints in any thread. `new_vocabulary` describes the tokens of the model, given the end
    token; `num_processors` are those of this process."""

    def __init__(self, new_vocabulary: Callable[[int], Vocabulary], num_processors: int) -> None:
        self._new_vocabulary = new_vocabulary
        self._vocabularies: dict[int, Vocabulary] = {}
        self._lock = threading.Lock()
        self._has_more = threading.Condition(self._lock)
        self._turns: FairTurns[_Job] = FairTurns(min(_THREADS_PER_TENANT, max(1, num_processors // 2)))
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

    def compiled(self, constraint: Constraint, end_id: int, tenant: str = "") -> CompiledConstraint:
        """Returns the compiled constraint of answers that `end_id` ends.

        Raises `InvalidRequest` if the constraint cannot be compiled, and `Overloaded` if too many others are being
        compiled.
        """
        job = _Job(Future(), constraint, self._vocabulary(end_id), tenant)
        with self._lock:
            self._turns.push(job)
            self._has_more.notify()
        self._start_thread()
        try:
            return job.done.result(_MAX_S)
        except TimeoutError:
            with self._lock:
                was_waiting = job.done.cancel()
                if was_waiting:
                    self._turns.remove(job)
            if was_waiting:
                raise Overloaded(_NUM_THREADS, _MAX_S, QueueBound.CONSTRAINTS) from None
            raise _refused(constraint, "takes too long to compile") from None
        except ValueError:  # a text that is not valid Unicode, or JSON of which half a character is
            raise _refused(constraint, "cannot be used: it has half of a surrogate pair") from None

    def _vocabulary(self, end_id: int) -> Vocabulary:
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
            done, constraint, vocabulary, tenant = self._take()
            try:
                done.set_result(self._compile(constraint, vocabulary))
            except BaseException as error:  # a panic of the library is not an `Exception`
                done.set_exception(error)
            del done, constraint, vocabulary
            with self._lock:
                self._turns.end(tenant)

    def _take(self) -> _Job:
        """Returns the next job, once there is one whose tenant may run another."""
        with self._lock:
            while (job := self._turns.start()) is None:
                self._has_more.wait()
            job.done.set_running_or_notify_cancel()
            return job

    def _compile(self, constraint: Constraint, vocabulary: Vocabulary) -> CompiledConstraint:
        if constraint.json_schema is not None:
            return self._compile_schema(constraint, vocabulary)
        regex = "|".join(map(_literal, constraint.choices)) if constraint.regex is None else constraint.regex
        whole: dict[str, Any] = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))
        (grammar,) = whole["grammars"]
        library = self._new_library(grammar["lark_grammar"], vocabulary)
        if library.is_error():
            raise _refused(constraint, f"cannot be used: {cause_of(library.get_error())}")
        return CompiledConstraint(library, vocabulary.end_id)

    def _compile_schema(self, constraint: Constraint, vocabulary: Vocabulary) -> CompiledConstraint:
        given: dict[str, Any] = parse_schema(cast(str, constraint.json_schema))
        schema, problems, inexact, is_narrowed = library_schema(given)
        if problems:
            raise _refused(constraint, *problems, *inexact)
        library = self._exact_library(schema, vocabulary) if inexact or is_narrowed else None
        if library is None and inexact:
            raise _refused(constraint, *inexact)
        if library is None:
            if is_narrowed:
                schema = library_schema(given, may_narrow=True).schema
            library = self._new_library(_rules(schema), vocabulary)
        if library.is_error():
            error = located(schema, library.get_error(), lambda each: self._error_of(each, vocabulary))
            raise _refused(constraint, error)
        rest_tokens = rest_tokens_of(library, vocabulary.json, vocabulary.end_id)
        check = AnswerCheck.of(given)
        longest = _longest_text(schema)
        return CompiledConstraint(library, vocabulary.end_id, vocabulary.json, rest_tokens, longest, check)

    def _exact_library(self, schema: dict[str, Any], vocabulary: Vocabulary) -> llguidance.LLMatcher | None:
        """Returns the grammar of our rules around the library's, or None if they cannot express the schema."""
        try:
            library = self._new_library(exact_rules(schema, _JSON_FORM), vocabulary)
        except NotExpressibleError:
            return None
        return None if library.is_error() else library

    def _new_library(self, rules: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
        grammar = llguidance.LLMatcher.grammar_from_lark(_NOTHING_IS_FORCED + rules)
        library = llguidance.LLMatcher(vocabulary.library, grammar, log_level=0, limits=self._limits)
        if not library.is_error():
            # Some errors show only here, such as a schema that nothing satisfies. Copies keep what this computes.
            library.compute_bitmask()
        return library

    def _error_of(self, schema: dict[str, Any], vocabulary: Vocabulary) -> str:
        library = self._new_library(_rules(schema), vocabulary)
        return library.get_error() if library.is_error() else ""


def _rules(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': _JSON_FORM}, default=float)}"


def _longest_text(schema: Any) -> int:
    """Returns the largest `maxLength` of the schemas within one, or 0."""
    if isinstance(schema, list):
        return max(map(_longest_text, cast("list[Any]", schema)), default=0)
    if not isinstance(schema, dict):
        return 0
    own = cast("dict[str, Any]", schema)
    given = own.get("maxLength")
    longest = max(map(_longest_text, own.values()), default=0)
    return max(longest, given) if isinstance(given, int) else longest


def _literal(text: str) -> str:
    """Returns a regular expression that matches this text alone."""
    return "".join(f"\\{character}" if character in _ESCAPED else character for character in text)


def _refused(constraint: Constraint, *problems: str) -> InvalidRequest:
    kind = "choices" if constraint.regex is None else "regex"
    field = f"constraint.{kind if constraint.json_schema is None else 'json_schema'}"
    return InvalidRequest(tuple(Violation(field, problem) for problem in problems))


def new_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_id: int) -> Vocabulary:
    """Returns the vocabulary of all ids below `vocab_size`; `end_id` ends an answer. Takes about 0.15 s for 50,000
    tokens.

    Answers never contain control tokens, or ids that the tokenizer does not have.
    """
    spelled = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    spelled[end_id] = b""
    json_tokens = JsonTokens(tuple(spelled))
    special = [token_id for token_id, spelling in enumerate(spelled) if not spelling]
    for token_id in special:
        spelled[token_id] = b"<|control %d|>" % token_id
    described = llguidance.TokenizerWrapper(_Described(spelled, special, end_id))
    return Vocabulary(llguidance.LLTokenizer(described, n_vocab=vocab_size), json_tokens, end_id)


class _Described:
    """Provides the attributes that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, tokens: list[bytes], special: list[int], end_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end_id
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a forced text. Never called, since no text is forced."""
        raise NotImplementedError
