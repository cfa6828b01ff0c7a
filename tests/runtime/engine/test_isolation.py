"""A failed step ends only who broke it. R1 to R3 are the invariants of `kestrel_runtime.engine.isolation`."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import EngineUnavailable, InternalError, KestrelError, RequestRefused
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import (
    CachePolicy,
    Caption,
    Detect,
    Query,
    Request,
    RequestOptions,
    SamplingParams,
)
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.poison_requests import fingerprint_of
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.request_state import RequestState
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.models.second_family.small_pictures import PicturesQuery

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
POISON = Query(
    "poison",
    IMAGE,
    sampling=SamplingParams(temperature=5.0, max_tokens=40, seed=9),
    options=RequestOptions(cache=CachePolicy.BYPASS),  # so that its image is encoded
)
SERVING, RECOVERING, DEAD = EngineStatus.SERVING, EngineStatus.RECOVERING, EngineStatus.DEAD


class Stage(NamedTuple):
    """A method, and the sequences that it works for, by its first argument."""

    owner: type
    method: str
    sequences: Callable[[Any], Iterable[TokenSequence]]


ENCODE = Stage(StepRunner, "launch", lambda batch: [item.sequence for item in batch.encode])
PREFILL = Stage(StepRunner, "launch", lambda batch: [chunk.sequence for chunk in batch.prefill])
DECODE = Stage(StepRunner, "launch", lambda batch: batch.decode)
SAMPLING = Stage(RequestState, "needs", list)


def bystanders() -> list[Request]:
    """Requests of several kinds that live through many steps."""
    # Seeds with which no draw lies so near its neighbour that the rounding of another batch decides.
    drawn = [SamplingParams(temperature=5.0, max_tokens=25, seed=seed) for seed in range(4, 8)]
    return [
        Query("hello", sampling=drawn[0]),
        Caption(IMAGE, sampling=drawn[1]),
        Query("What is this?", IMAGE, reasoning=True, sampling=drawn[2]),
        Detect("copy", IMAGE, max_objects=4),
        Query("word " * 60, sampling=drawn[3]),
    ]


def watch(monkeypatch: pytest.MonkeyPatch, stage: Stage, look: Callable[[list[TokenSequence]], None]) -> None:
    """Have `look` see who was worked for, after the stage: what it raises, the stage raises."""
    original = getattr(stage.owner, stage.method)

    def patched(self: object, work: Any, *rest: Any) -> Any:
        result = original(self, work, *rest)  # the worst case: all is written, and then it fails
        if sequences := list(stage.sequences(work)):
            look(sequences)
        return result

    monkeypatch.setattr(stage.owner, stage.method, patched)


def poison(
    monkeypatch: pytest.MonkeyPatch,
    stage: Stage,
    error: Exception,
    *,
    after: int = 0,
    requests: tuple[Request, ...] = (POISON,),
) -> None:
    """`stage` raises `error` whenever one of `requests` takes part and has generated `after` tokens."""
    marked = {fingerprint_of(request) for request in requests}

    def look(sequences: list[TokenSequence]) -> None:
        if any(
            sequence.request.fingerprint in marked and sequence.num_generated >= after for sequence in sequences
        ):
            raise error

    watch(monkeypatch, stage, look)


def statuses_of(engine: LocalEngine) -> list[EngineStatus]:
    statuses: list[EngineStatus] = []
    engine.on_status_change(statuses.append)
    return statuses


async def outcome(stream: Stream) -> object:
    """What a stream ends with: its output, or its error."""
    try:
        return (await stream.result()).output
    except KestrelError as error:
        return error


async def outcomes(engine: LocalEngine, requests: list[Request]) -> list[object]:
    return list(await asyncio.gather(*(outcome(engine.submit(request)) for request in requests)))


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[object]:
    """The bystanders' answers when nothing fails and no other request runs."""

    async def ask() -> list[object]:
        return [await outcome(engine.submit(request)) for request in bystanders()]

    engine = LocalEngine(loaded, EngineConfig(model=""))
    answers = asyncio.run(ask())
    engine.close()
    assert not [answer for answer in answers if isinstance(answer, KestrelError)]
    return answers


@pytest.mark.parametrize("looks_ahead", [False, True], ids=["", "looking ahead"])
@pytest.mark.parametrize(
    ("stage", "error", "after"),
    [
        pytest.param(ENCODE, RuntimeError("secret"), 0, id="vision"),
        pytest.param(PREFILL, RuntimeError("secret"), 0, id="prefill"),
        pytest.param(PREFILL, torch.OutOfMemoryError("secret"), 0, id="out of memory in prefill"),
        pytest.param(DECODE, RuntimeError("secret"), 5, id="decode"),
        pytest.param(DECODE, torch.OutOfMemoryError("secret"), 5, id="out of memory in decode"),
        pytest.param(SAMPLING, RuntimeError("secret"), 0, id="first draw"),
        pytest.param(SAMPLING, RuntimeError("secret"), 5, id="later draw"),
    ],
)
async def test_r1_the_poison_request_ends_alone_and_is_refused_the_second_time(
    engine: LocalEngine,
    alone: list[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stage: Stage,
    error: Exception,
    after: int,
    looks_ahead: bool,
) -> None:
    monkeypatch.setattr(StepRunner, "is_asynchronous", looks_ahead)
    poison(monkeypatch, stage, error, after=after)
    statuses = statuses_of(engine)
    requests = bystanders()
    *others, poison_outcome = await outcomes(engine, [*requests, POISON])
    assert others == alone
    assert isinstance(poison_outcome, InternalError)
    assert poison_outcome.__cause__ is error
    assert "secret" not in str(poison_outcome)
    assert "secret" in caplog.text
    assert fingerprint_of(POISON) in caplog.text
    assert ("out of memory" in caplog.text) == isinstance(error, torch.OutOfMemoryError)
    assert engine.load().num_used_pages == 0
    # The second time nothing is tried, so no other request is delayed.
    caplog.clear()
    bystander, poison_outcome = await outcomes(engine, [requests[0], POISON])
    assert bystander == alone[0]
    assert isinstance(poison_outcome, RequestRefused)
    assert caplog.text == ""
    assert (engine.status, statuses) == (SERVING, [])  # no caller was told to use another server


async def test_a_parser_that_fails_ends_its_own_request(
    engine: LocalEngine, alone: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    new_parser = PicturesQuery.new_parser

    def broken(self: PicturesQuery, request: Query, *context: Any) -> Any:
        made = new_parser(self, request, *context)
        if request == POISON:
            monkeypatch.setattr(made, "consume", lambda token: 1 / 0)
        return made

    monkeypatch.setattr(PicturesQuery, "new_parser", broken)
    *others, poison_outcome = await outcomes(engine, [*bystanders(), POISON])
    assert others == alone
    assert isinstance(poison_outcome, InternalError)
    assert "ZeroDivisionError" in caplog.text
    assert engine.load().num_used_pages == 0
    assert engine.status is SERVING


async def test_r3_failures_only_within_a_batch_end_no_request(
    engine: LocalEngine, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shared = itertools.count(1)

    def look(sequences: list[TokenSequence]) -> None:
        if len(sequences) > 1 and next(num_shared) % 4 == 0:
            raise torch.OutOfMemoryError("too many at once")

    watch(monkeypatch, SAMPLING, look)
    statuses = statuses_of(engine)
    assert await outcomes(engine, bystanders()) == alone
    assert next(num_shared) > 8
    assert statuses == []
    assert engine.load().num_used_pages == 0


async def test_r3_a_cache_too_small_for_all_sequences_does_not_prevent_isolation(
    loaded: LoadedModel, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, DECODE, RuntimeError("no"), after=5)
    engine = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=100))
    *others, poison_outcome = await outcomes(engine, [*bystanders(), POISON])
    assert others == alone
    assert isinstance(poison_outcome, InternalError)
    assert engine.load().num_used_pages == 0
    engine.close()


async def test_r2_poison_requests_in_a_row_have_the_engine_restart_and_serve_on(
    engine: LocalEngine, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = tuple(Query(f"poison {number}") for number in range(3))
    poison(monkeypatch, PREFILL, RuntimeError("no"), requests=several)
    statuses = statuses_of(engine)
    assert {type(item) for item in await outcomes(engine, list(several))} == {InternalError}
    assert await outcomes(engine, bystanders()) == alone
    assert statuses == [RECOVERING, SERVING]


class FragileDevice:
    """Breaks when told to; everything fails then, until the cache is made anew (`is_lost`: for ever).

    Nothing is computed before `may_begin` is set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any, *, is_lost: bool = False) -> None:
        self.is_broken = False
        self.num_renewals = 0
        self.may_begin = threading.Event()
        self.may_begin.set()
        forward, renew = model.attended, KVCache.renew

        def fragile(*work: Any) -> Any:
            assert self.may_begin.wait(60)
            if self.is_broken:
                raise RuntimeError("the device is gone")
            return forward(*work)

        def renewed(cache: KVCache) -> None:
            self.num_renewals += 1
            self.is_broken = is_lost
            renew(cache)

        monkeypatch.setattr(model, "attended", fragile)
        monkeypatch.setattr(KVCache, "renew", renewed)


async def test_a_device_that_a_restart_repairs_costs_no_answer(
    engine: LocalEngine, loaded: LoadedModel, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FragileDevice(monkeypatch, loaded.model)
    statuses = statuses_of(engine)
    streams = [engine.submit(request) for request in bystanders()]
    await anext(streams[0])
    device.is_broken = True
    assert list(await asyncio.gather(*map(outcome, streams))) == alone
    assert statuses == [RECOVERING, SERVING]
    assert device.num_renewals == 1
    assert engine.load().num_used_pages == 0


async def test_who_breaks_the_device_itself_is_pardoned_once(
    engine: LocalEngine, loaded: LoadedModel, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FragileDevice(monkeypatch, loaded.model)

    def look(sequences: list[TokenSequence]) -> None:
        if any(sequence.request.fingerprint == fingerprint_of(POISON) for sequence in sequences):
            device.is_broken = True
            raise RuntimeError("broken")

    watch(monkeypatch, PREFILL, look)
    statuses = statuses_of(engine)
    *others, poison_outcome = await outcomes(engine, [*bystanders(), POISON])
    assert others == alone
    assert isinstance(poison_outcome, InternalError)
    # Once for the first isolation run after the failed step, and twice for the poison request.
    assert device.num_renewals in (2, 3)
    assert statuses == [RECOVERING, SERVING] * device.num_renewals


@pytest.mark.parametrize("fails", ["the probe", "the cache"])
async def test_a_device_that_a_restart_does_not_mend_is_dead(
    engine: LocalEngine,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    device = FragileDevice(monkeypatch, loaded.model, is_lost=fails == "the probe")
    device.may_begin.clear()
    if fails == "the cache":
        monkeypatch.setattr(KVCache, "renew", lambda cache: 1 / 0)
    statuses = statuses_of(engine)
    streams = [engine.submit(request) for request in bystanders()]
    # Before the first step: by the time this thread heard of one, a short request could have ended.
    device.is_broken = True
    device.may_begin.set()
    ends = await asyncio.gather(*map(outcome, streams))
    assert {type(end) for end in ends} == {EngineUnavailable}  # no request is blamed
    assert statuses == [RECOVERING, DEAD]
    assert "the device is gone" in caplog.text
    with pytest.raises(EngineUnavailable):
        await engine.submit(POISON).result()
    assert engine.load().num_used_pages == 0


async def test_while_it_restarts_newcomers_are_refused_and_draining_goes_on(
    engine: LocalEngine, loaded: LoadedModel, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FragileDevice(monkeypatch, loaded.model)
    statuses = statuses_of(engine)
    refusals: list[Exception] = []

    async def ask() -> None:
        await engine.submit(POISON).result()

    def turned_away(status: EngineStatus) -> None:
        if status is RECOVERING:
            try:
                asyncio.run(ask())
            except EngineUnavailable as error:
                refusals.append(error)

    engine.on_status_change(turned_away)
    streams = [engine.submit(request) for request in bystanders()]
    await anext(streams[0])
    device.is_broken = True
    assert list(await asyncio.gather(*map(outcome, streams))) == alone
    assert len(refusals) == 1
    running = engine.submit(bystanders()[0])
    await anext(running)
    draining = asyncio.ensure_future(engine.drain())
    device.is_broken = True
    assert isinstance(await running.result(), Finished)
    await draining
    assert statuses == [RECOVERING, SERVING, EngineStatus.DRAINING]  # and not back to serving


async def test_a_request_may_be_cancelled_in_its_isolation_run(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, DECODE, RuntimeError("no"), after=5)
    streams = [engine.submit(request) for request in (*bystanders(), POISON)]

    def leave(sequences: list[TokenSequence]) -> None:
        if len(sequences) == 1:
            for stream in streams:
                stream.loop.call_soon_threadsafe(stream.cancel)

    watch(monkeypatch, PREFILL, leave)
    await asyncio.wait([stream.over for stream in streams])
    assert isinstance(await engine.submit(Query("hi")).result(), Finished)
    assert engine.load().num_used_pages == 0
