"""Compiling constraints: what is refused, and that no other request waits for a hostile one."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import InvalidRequest, Overloaded
from kestrel_runtime.constraints import compiler as module
from kestrel_runtime.constraints.compiler import ConstraintCompiler
from kestrel_runtime.constraints.masks import CompiledConstraint
from tests.runtime.constraints.vocabularies import END_ID, TOKENIZER, VOCAB_SIZE, new_compiler

TEXTS = ("yes", "a/b\\c", 'say "x"', "[x]{2}", "^$|.*+?()", "#&-~/<>@!%=:;,'`_", "line\nline", "é漢🙂", " a  b ")


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return new_compiler()


@pytest.mark.parametrize("text", TEXTS)
def test_a_choice_means_itself_whatever_its_characters(compiler: ConstraintCompiler, text: str):
    for choices in ((text,), ("other", text)):
        compiled = compiler.compiled(Constraint(choices=choices), END_ID).library
        assert compiled.consume_tokens(TOKENIZER.encode(text)), compiled.get_error()
        assert compiled.is_accepting()
    alone = compiler.compiled(Constraint(choices=(text,)), END_ID).library
    assert not alone.consume_tokens(TOKENIZER.encode("zz"))


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint(regex="a(b"), "constraint.regex"),
        (Constraint(regex="(?<=a)b"), "constraint.regex"),
        (Constraint(regex=r"(a)\1"), "constraint.regex"),
        (Constraint(regex="\ud800"), "constraint.regex"),
        (Constraint(json_schema='{"$ref": "#/$defs/missing"}'), "constraint.json_schema"),
        (Constraint(json_schema='{"allOf": [{"$ref": "#"}]}'), "constraint.json_schema"),
        (Constraint(json_schema='{"type": "integer", "minimum": 3, "maximum": 2}'), "constraint.json_schema"),
        (Constraint(json_schema='{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "constraint.json_schema"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_field(
    compiler: ConstraintCompiler, constraint: Constraint, field: str
):
    with pytest.raises(InvalidRequest) as caught:
        compiler.compiled(constraint, END_ID)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert "cannot be used" in violation.description


@pytest.mark.parametrize(
    "pattern", ["^(.*[{}].{{30}})*$", "^(.*[{}].{{400}})*$", "^((.*{}.{{30}})*|(.*x.{{31}})*)*$"]
)
def test_patterns_that_hold_at_once_are_given_up_instead_of_combined_without_end(
    compiler: ConstraintCompiler, pattern: str
):
    parts = [{"type": "string", "pattern": pattern.format(letter)} for letter in "abcdefgh"]
    constraint = Constraint(json_schema=json.dumps({"allOf": parts}))
    assert not list(constraint.violations())
    with pytest.raises(InvalidRequest, match="too complex"):
        compiler.compiled(constraint, END_ID)


def test_text_that_must_come_is_not_followed_to_its_end(compiler: ConstraintCompiler):
    word = max((TOKENIZER.token_bytes(number).decode(errors="ignore") for number in range(VOCAB_SIZE)), key=len)
    compiled = compiler.compiled(Constraint(json_schema=json.dumps({"const": word * 100})), END_ID).library
    compiled.consume_token(TOKENIZER.encode('"')[0])
    mask = int.from_bytes(compiled.compute_bitmask(), "little")
    spelled = [TOKENIZER.token_bytes(token_id).decode() for token_id in range(VOCAB_SIZE) if mask >> token_id & 1]
    # Followed to its end, the text would be spelled by the tokenizer, which takes one of these.
    assert {word[0], word} <= set(spelled)
    assert all((word * 100).startswith(token) for token in spelled)


def test_a_tenant_that_holds_up_compiling_keeps_only_itself_waiting(monkeypatch: pytest.MonkeyPatch):
    compiler = new_compiler()
    goes_on = threading.Event()
    compile_one = ConstraintCompiler._compile

    def held_up(own: ConstraintCompiler, constraint: Constraint, vocabulary: Any) -> CompiledConstraint:
        if constraint == hostile:
            goes_on.wait(30)
        return compile_one(own, constraint, vocabulary)

    hostile, harmless = Constraint(regex="a"), Constraint(regex="b")
    monkeypatch.setattr(ConstraintCompiler, "_compile", held_up)
    monkeypatch.setattr(module, "_MAX_S", 0.001)
    told: list[type[Exception]] = []
    while told.count(InvalidRequest) < 2:  # in between, a thread may not have been there in time
        with pytest.raises((InvalidRequest, Overloaded), match=r"takes too long|may wait in all") as caught:
            compiler.compiled(hostile, END_ID, "hostile")
        told.append(caught.type)
    for constraint in (hostile, harmless):
        with pytest.raises(Overloaded):
            compiler.compiled(constraint, END_ID, "hostile")
    monkeypatch.setattr(module, "_MAX_S", 30.0)
    assert not compiler.compiled(harmless, END_ID, "another").library.is_error()
    goes_on.set()
    assert not compiler.compiled(harmless, END_ID, "hostile").library.is_error()


@pytest.mark.parametrize(("num_processors", "part"), [(1, 1), (2, 1), (3, 1), (5, 2), (64, 2)])
def test_a_tenant_whose_jobs_end_one_by_one_never_runs_more_than_its_part(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, part: int
):
    compiler = new_compiler(num_processors)
    started, may_end = threading.Semaphore(0), threading.Semaphore(0)
    compile_one = ConstraintCompiler._compile

    def held_up(own: ConstraintCompiler, constraint: Constraint, vocabulary: Any) -> CompiledConstraint:
        if constraint != harmless:
            started.release()
            may_end.acquire(timeout=30)
        return compile_one(own, constraint, vocabulary)

    harmless = Constraint(regex="a")
    monkeypatch.setattr(ConstraintCompiler, "_compile", held_up)
    with ThreadPoolExecutor(6) as callers:
        jobs = [callers.submit(compiler.compiled, Constraint(regex=text), END_ID, "busy") for text in "bcdefg"]
        for _ in range(part):
            assert started.acquire(timeout=30)
        may_end.release()
        assert started.acquire(timeout=30)  # in place of the one that has ended
        for _ in range(2):  # threads that are free look for a job behind it
            assert not compiler.compiled(harmless, END_ID, "another").library.is_error()
        assert not started.acquire(blocking=False)
        may_end.release(5)
        assert not any(job.result().library.is_error() for job in jobs)


def test_what_raises_in_the_library_reaches_its_caller_alone(monkeypatch: pytest.MonkeyPatch):
    compiler = new_compiler()

    class Panic(BaseException):
        pass

    def panic(*_: Any) -> CompiledConstraint:
        raise Panic

    with monkeypatch.context() as patched:
        patched.setattr(ConstraintCompiler, "_compile", panic)
        for _ in range(5):
            with pytest.raises(Panic):
                compiler.compiled(Constraint(regex="a"), END_ID)
    assert not compiler.compiled(Constraint(regex="a"), END_ID).library.is_error()
