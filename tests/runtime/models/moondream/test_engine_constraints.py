"""Constrained answers of a small Moondream 3, whose random weights know neither JSON nor anything else."""

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import jsonschema
import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import AnswerOutsideSchema, ConstraintFailed, InternalError, InvalidRequest
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput, TextDelta
from kestrel_runtime.api.requests import CachePolicy, Query, RequestOptions, SamplingParams
from kestrel_runtime.constraints.answer_check import AnswerCheck
from kestrel_runtime.constraints.masks import AnswerMatcher
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.reference_fixtures import MD3_SMALL

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    Constraint(choices=("yes", "no", "not at all")),
    Constraint(regex="[0-9]{3}-[a-z]{2,5}"),
    Constraint(json_schema=json.dumps(SCHEMA)),
)
HOT = SamplingParams(temperature=3.0, max_tokens=200, seed=5)


@pytest.fixture
def engine(shallow3: LoadedModel) -> Iterator[LocalEngine]:
    engine = LocalEngine(shallow3, EngineConfig(model="", max_batch_size=8))
    yield engine
    engine.close()


def satisfies(answer: str, constraint: Constraint) -> bool:
    if constraint.json_schema is not None:
        jsonschema.validate(json.loads(answer), json.loads(constraint.json_schema))
        return True
    if constraint.regex is not None:
        return re.fullmatch(constraint.regex, answer) is not None
    return answer in constraint.choices


def answer_of(finished: Finished) -> str:
    assert isinstance(finished.output, QueryOutput)
    return finished.output.answer


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
async def test_a_complete_answer_satisfies_its_constraint(
    engine: LocalEngine, constraint: Constraint, temperature: float
):
    sampling = SamplingParams(temperature=temperature, max_tokens=200, seed=3)
    finished = await engine.submit(Query("what?", IMAGE, sampling=sampling, constraint=constraint)).result()
    assert finished.finish_reason is FinishReason.STOP
    assert satisfies(answer_of(finished), constraint)


async def test_reasoning_is_free_and_the_answer_is_not(engine: LocalEngine):
    sampling = SamplingParams(temperature=2.0, max_tokens=60, seed=4)
    query = Query("why?", IMAGE, reasoning=True, sampling=sampling)
    free, bound = await asyncio.gather(
        engine.submit(query).result(), engine.submit(replace(query, constraint=CONSTRAINTS[0])).result()
    )
    assert isinstance(free.output, QueryOutput)
    assert isinstance(bound.output, QueryOutput)
    assert bound.output.reasoning is not None
    assert bound.output.reasoning.text
    assert bound.output.reasoning == free.output.reasoning
    assert bound.output.answer in CONSTRAINTS[0].choices


async def test_an_answer_that_is_cut_short_says_so(engine: LocalEngine):
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    finished = await engine.submit(Query("what?", sampling=sampling, constraint=CONSTRAINTS[2])).result()
    assert finished.finish_reason is FinishReason.LENGTH
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer_of(finished))


async def test_a_stop_string_ends_a_constrained_answer(engine: LocalEngine):
    sampling = SamplingParams(temperature=0.0, max_tokens=200, stop=('"count"',))
    finished = await engine.submit(Query("what?", sampling=sampling, constraint=CONSTRAINTS[2])).result()
    assert (finished.finish_reason, finished.stop_sequence) == (FinishReason.STOP_SEQUENCE, '"count"')
    assert re.fullmatch(r'\{"colour": "(red|blue)", ', answer_of(finished))


async def test_penalties_and_biases_bring_no_forbidden_token_back(engine: LocalEngine):
    biases = tuple((token_id, 100.0) for token_id in range(300, 500))
    sampling = replace(HOT, top_k=3, min_p=0.01, repetition_penalty=2.0, presence_penalty=1.0, logit_bias=biases)
    asked = (engine.submit(Query("what?", sampling=sampling, constraint=item)).result() for item in CONSTRAINTS)
    for finished, constraint in zip(await asyncio.gather(*asked), CONSTRAINTS, strict=True):
        assert finished.finish_reason is FinishReason.STOP
        assert satisfies(answer_of(finished), constraint)


async def test_each_of_several_samples_follows_the_constraint_by_itself(engine: LocalEngine):
    samples = replace(HOT, n=6).samples()
    queries = [Query("what?", IMAGE, sampling=sampling, constraint=CONSTRAINTS[1]) for sampling in samples]
    answers = [answer_of(await stream.result()) for stream in [engine.submit(query) for query in queries]]
    assert all(satisfies(answer, CONSTRAINTS[1]) for answer in answers)
    assert len(set(answers)) > 1


async def test_logprobs_are_those_of_the_model_without_the_mask(engine: LocalEngine):
    sampling = SamplingParams(temperature=0.0, max_tokens=200, logprobs=1)
    finished = await engine.submit(Query("what?", sampling=sampling, constraint=CONSTRAINTS[2])).result()
    assert isinstance(finished.output, QueryOutput)
    assert finished.output.logprobs
    assert any(token.logprob < token.top[0].logprob for token in finished.output.logprobs)


async def test_others_of_a_batch_answer_as_they_do_alone(engine: LocalEngine):
    free = [Query(f"question {number}", sampling=replace(HOT, max_tokens=20)) for number in range(3)]
    bound = [Query("what?", sampling=HOT, constraint=constraint) for constraint in CONSTRAINTS]
    alone = [(await engine.submit(query).result()).output for query in (*free, *bound)]
    together = await asyncio.gather(*(engine.submit(query).result() for query in (*bound, *free)))
    assert [finished.output for finished in together] == [*alone[3:], *alone[:3]]


async def test_a_forward_pass_ahead_and_preemption_change_no_answer(
    shallow3: LoadedModel, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    sampling = replace(HOT, max_tokens=32)
    long = Constraint(regex="[0-9]{32}")
    queries = [
        Query("what?", IMAGE if number < 2 else None, not number % 4, sampling=sampling, constraint=item)
        for number, item in enumerate((long, long, long, None, *CONSTRAINTS, *CONSTRAINTS))
    ]
    queries = [replace(query, options=RequestOptions(cache=CachePolicy.BYPASS)) for query in queries]
    one_by_one = [await engine.submit(query).result() for query in queries]
    monkeypatch.setattr(StepRunner, "is_asynchronous", True)
    are_complete = cycle((False, False, True))
    monkeypatch.setattr(StepHandle, "is_complete", lambda _: next(are_complete))
    preempted: Counter[bool] = Counter()
    preempt = Scheduler._preempt

    def counted(scheduler: Scheduler, sequence: TokenSequence) -> None:
        preempted[sequence.request.matcher is not None and sequence.num_generated > 1] += 1
        preempt(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    ahead = LocalEngine(shallow3, EngineConfig(model="", num_kv_pages=64, page_size=4, max_prefill_tokens=32))
    try:
        for _ in range(8):  # until so many have run at the same time that their answers need more pages
            overlapped = await asyncio.gather(*(ahead.submit(query).result() for query in queries))
            assert [finished.output for finished in overlapped] == [finished.output for finished in one_by_one]
            assert [each.finish_reason for each in overlapped] == [each.finish_reason for each in one_by_one]
            if preempted[True]:
                break
        assert preempted[True], "a constrained answer was to be preempted in its middle"
    finally:
        ahead.close()


async def test_a_matcher_that_fails_ends_its_request_alone(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch):
    take = AnswerMatcher.take
    failing = Constraint(regex="[0-9]{50}")

    def failing_after_three(matcher: AnswerMatcher, generated: Any) -> None:
        take(matcher, generated)
        if len(generated) == 7:  # answers to the other constraints are shorter
            raise ConstraintFailed

    monkeypatch.setattr(AnswerMatcher, "take", failing_after_three)
    others = [Constraint(regex="[0-9]{2}"), None, Constraint(choices=("x",)), None]
    streams = [engine.submit(Query("what?", sampling=HOT, constraint=item)) for item in (failing, *others)]
    with pytest.raises(ConstraintFailed):
        await streams[0].result()
    for stream, constraint in zip(streams[1:], others, strict=True):
        answer = answer_of(await stream.result())
        assert constraint is None or satisfies(answer, constraint)


async def test_an_answer_is_checked_by_a_worker_and_ends_with_a_reason_where_it_misses_its_schema(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    threads: list[str] = []

    def missing(_: AnswerCheck, answer: str) -> str | None:
        threads.append(threading.current_thread().name)
        return "/count" if "9" in answer else None

    monkeypatch.setattr(AnswerCheck, "miss", missing)
    schemas = [{"enum": [13, 14]}, {"enum": [19, 29]}, {"enum": ["9"]}, {"enum": [123456, 123457]}]
    queries = [
        Query("what?", sampling=HOT, constraint=Constraint(json_schema=json.dumps(item))) for item in schemas
    ]
    cut_short = replace(queries[3], sampling=replace(HOT, max_tokens=1))
    streams = [engine.submit(query) for query in (*queries[:3], cut_short)]
    assert answer_of(await streams[0].result()) in ("13", "14")
    pieces: list[str] = []

    async def read() -> None:
        async for event in streams[1]:
            pieces.append(event.text if isinstance(event, TextDelta) else "")

    with pytest.raises(AnswerOutsideSchema, match="/count"):
        await read()
    assert "".join(pieces) in ("19", "29")
    assert answer_of(await streams[2].result()) == '"9"', "nothing bounds a number"
    assert (await streams[3].result()).finish_reason is FinishReason.LENGTH
    assert len(threads) == 2
    assert all("preprocess" in name for name in threads)


async def test_a_check_that_fails_is_a_fault_of_the_server(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AnswerCheck, "miss", lambda *_: 1 / 0)
    with pytest.raises(InternalError):
        await engine.submit(
            Query("what?", sampling=HOT, constraint=Constraint(json_schema='{"const": 3}'))
        ).result()


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint(regex="(?=a)b"), "constraint.regex"),
        (Constraint(regex="a(b"), "constraint.regex"),
        (Constraint(json_schema='{"$ref": "#"}'), "constraint.json_schema"),
        (Constraint(json_schema='{"type": "colour"}'), "constraint.json_schema"),
        (Constraint(json_schema='{"enum": []}'), "constraint.json_schema"),
        (Constraint(json_schema='{"const": "\\ud800"}'), "constraint.json_schema"),
        (Constraint(choices=("\ud800",)), "constraint.choices"),
    ],
)
async def test_a_constraint_that_cannot_be_compiled_is_refused(
    engine: LocalEngine, constraint: Constraint, field: str
):
    with pytest.raises(InvalidRequest) as caught:
        await engine.submit(Query("what?", constraint=constraint)).result()
    assert [violation.field for violation in caught.value.violations] == [field]
    assert "\ud800" not in str(caught.value)
