"""Whatever raises in the engine thread, at whichever line: no caller is left waiting.

A scenario that passes through every line of the loop and of its isolation is played once for each of them, and the
line raises. The runner is a fake one and sequences are made by hand, so that a run takes milliseconds and the same
turns each time.
"""

import ast
import asyncio
import contextlib
import functools
import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, NoneType
from typing import Any, cast

import pytest
import torch

from kestrel_runtime.api import stream
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import (
    ConstraintFailed,
    DeadlineExceeded,
    EngineUnavailable,
    InternalError,
    KestrelError,
    NumbersOverflowed,
)
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Query
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.constraints.masks import MaskRequest
from kestrel_runtime.engine import isolation, open_streams
from kestrel_runtime.engine import loop as engine_loop
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.isolation import Isolation
from kestrel_runtime.engine.loop import EngineLoop
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.fairness import waiting_queue
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.output.embedding import EmbeddingForm
from kestrel_runtime.output.output_parser import OVERFLOWED, Token
from kestrel_runtime.scheduling import batch as step_batch
from kestrel_runtime.scheduling import page_manager, scheduler, sequence
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.runtime.fake_runner import TOKEN, FakeHandle, FakeRunner
from tests.runtime.sequences import ShortParser, blank_crops, new_sequence

MAX_WAIT_S = 30.0
FATES = (Finished, EngineUnavailable, InternalError, DeadlineExceeded, ConstraintFailed, NumbersOverflowed)
# What runs in the engine thread, but for what holds a lock: it is released when a line raises, and not where a
# trace function raises while the block is being left.
TRACED = {
    module.__file__
    for module in (
        engine_loop,
        open_streams,
        isolation,
        scheduler,
        waiting_queue,
        sequence,
        stream,
        page_manager,
        step_batch,
    )
}
KINDS = (SystemExit, KeyboardInterrupt, MemoryError, GeneratorExit, RuntimeError)
SCENARIOS = (
    "recovers",
    "dies",
    "cache is lost",
    "probe is lost",
    "three in a row",
    "restricted",
    "adapters",
    "embeddings",
)
Line = tuple[str, int]


def prepared(name: str, num_tokens: int = 3, *, is_broken: bool = False, has_image: bool = False) -> TokenSequence:
    """A sequence whose fingerprint is its name."""
    image: dict[str, Any] = {"num_image_tokens": 4, "pixels": blank_crops(3)} if has_image else {}
    made = new_sequence(6, max_context=200, **image)
    made.request.fingerprint = name
    made.request.parser = ShortParser(num_tokens, is_broken=is_broken)
    return made


def reading(name: str) -> TokenSequence:
    """A sequence that reads the embeddings of its image."""
    form = EmbeddingForm(patches=True, normalize=False, dtype="float16")
    made = new_sequence(1, num_image_tokens=4, pixels=blank_crops(3), embeddings=form)
    made.request.fingerprint = name
    return made


class Masks:
    """In place of the grammar library: it lets everything pass, but for the one that takes too much work."""

    def __init__(self, *_: object) -> None: ...

    def masks(self, requests: Iterable[MaskRequest]) -> list[Any]:
        return [ConstraintFailed() if request.matcher == "stuck" else None for request in requests]


class Checks:
    """In place of the check of answers by a worker: it finds nothing."""

    def deliver(self, stream: Stream, events: list[Any]) -> None:
        stream.post(stream.destination, [(stream, events, None)])


class Preparations:
    """In place of the preprocessor: a request is prepared when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._futures: list[Future[TokenSequence]] = []
        monkeypatch.setattr(Preprocessor, "submit", self._submit)

    def _submit(self, *_: object, **__: object) -> Future[TokenSequence]:
        self._futures.append(Future())
        return self._futures[-1]

    def of_next(self, engine: LocalEngine) -> tuple[Stream, Future[TokenSequence]]:
        made = engine.submit(Query("?"))
        return made, self._futures.pop()


class Device(FakeRunner):
    """Fails in every way that the loop handles."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scenario = SCENARIOS[0]
        self.on_second_launch: Callable[[], None] = lambda: None
        self._counts: Counter[str] = Counter()
        self.are_prompts_over = self._answer
        self.on_launch = self._launching
        self.on_wait = self._waiting
        self.on_sample = self._sampling
        self.on_run = self._running
        self.token_of = self._sampled

    def _first(self, what: str) -> bool:
        self._counts[what] += 1
        return self._counts[what] == 1

    def _answer(self) -> bool:
        self._counts["answer"] += 1
        if self._counts["answer"] == 12:
            raise RuntimeError("the device reports an error where it is asked first")
        return self._counts["answer"] > 8 and self._counts["answer"] % 3 == 0

    def _launching(self, batch: Batch) -> None:
        self._counts["launch"] += 1
        if self._counts["launch"] == 2:
            self.on_second_launch()
        self.is_asynchronous = self._counts["launch"] < 50
        names = [item.request.fingerprint for item in batch.sequences]
        if any(name.startswith("poison") for name in names):
            raise torch.OutOfMemoryError("poison")
        if self.scenario == "dies" and self._counts["launch"] == 4:
            raise SystemExit
        if batch.decode and "image" in names and self._first("decode of an image"):
            raise RuntimeError("a decode step cannot be launched, once")

    def _waiting(self, handle: FakeHandle) -> None:
        names = [chunk.sequence.request.fingerprint for chunk in handle.batch.prefill]
        if "long" in names and self._first("wait for long"):
            raise RuntimeError("noticed late")
        if handle.batch.decode and handle.batch.is_restricted:
            self._counts["wait for a restricted step"] += 1
            if self._counts["wait for a restricted step"] == 3:
                raise RuntimeError("noticed when the next step was launched in part")

    def _sampling(self, _: FakeHandle) -> None:
        self._counts["sample"] += 1
        if self._counts["sample"] == 12:
            raise RuntimeError("sampling cannot be launched, once")

    def _sampled(self, item: TokenSequence) -> Token:
        return Token(OVERFLOWED) if item.request.fingerprint == "overflowing" else TOKEN

    def _running(self, batch: Batch) -> None:
        if self._first("run") or (self.scenario == "probe is lost" and self.num_restarts):
            raise RuntimeError("the device fails a request of our own")

    def restart(self) -> None:
        super().restart()
        if self.scenario == "cache is lost":
            raise RuntimeError("no cache can be made")


def decoded_again(item: TokenSequence) -> Future[Any]:
    """What a worker does for a sequence without crops."""
    future: Future[Any] = Future()
    if item.decode_job == "lost image":
        future.set_exception(RuntimeError("it cannot be decoded any more"))
    else:
        future.set_result([blank_crops(3)])
    return future


class Adapter:
    """A lease of an adapter, in place of that of the store."""

    slot, tenant = 1, ""

    def __init__(self, name: str, *, is_reclaimed: bool = False) -> None:
        self.name, self.digest, self.is_reclaimed = name, b"one version", is_reclaimed

    def end(self) -> None:
        self.is_reclaimed = False


def leased_again(name: str, tenant: str) -> Future[Adapter]:
    """What the store does for a sequence that has given its lease back."""
    future: Future[Adapter] = Future()
    if name == "lost adapter":
        future.set_exception(RuntimeError("it cannot be read any more"))
    elif name != "leaving":
        future.set_result(Adapter(name))
        future.result().digest = b"another version" if name == "replaced" else b"one version"
    return future


@functools.cache
def lines_of(code: CodeType) -> frozenset[Line]:
    """The lines of a function."""
    return frozenset((code.co_filename, number) for _, _, number in code.co_lines() if number is not None)


@dataclass
class Tracer:
    """Notes the lines that the engine thread passes; raises `error` at the first visit of `target`."""

    target: Line | None = None
    error: BaseException | None = None
    lines: set[Line] = field(default_factory=set, repr=False)
    raised_at: float | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch, everybody_is_there: threading.Event) -> None:
        """Have the engine thread begin when all requests are in its inbox, and be traced."""
        run = EngineLoop._run  # the thread's first function

        def traced(loop: EngineLoop) -> None:
            everybody_is_there.wait(MAX_WAIT_S)
            sys.settrace(self._on_call)
            run(loop)

        monkeypatch.setattr(EngineLoop, "_run", traced)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.target is None:
            return self._on_line if frame.f_code.co_filename in TRACED else None
        # Python asks for each line of what is traced, which takes longer than the line.
        return self._on_line if self.raised_at is None and self.target in lines_of(frame.f_code) else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            self.lines.add(line)
            if line == self.target and self.raised_at is None and self.error is not None:
                self.raised_at = time.monotonic()
                sys.settrace(None)
                raise self.error
        return self._on_line


@dataclass
class Run:
    """What came of playing the scenario once."""

    ends: dict[str, object]
    """By name: the last event, or the error."""
    status: EngineStatus
    delay_s: float
    """From the moment of raising until every stream was over."""


async def end_of(waited: Stream, *, is_streamed: bool) -> object:
    """The last event, or the error, also of a caller that takes every event."""
    try:
        events = [event async for event in waited] if is_streamed else [await waited.result()]
        return events[-1]
    except KestrelError as error:
        return error
    except asyncio.CancelledError as error:
        return error if waited.is_cancelled else AssertionError("cancelled by whom?")


async def play(loaded: LoadedModel, tracer: Tracer, scenario: str) -> Run:
    """Requests of every fate, one that stays in preprocessing, and an engine that may die at any line."""
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        everybody_is_there = threading.Event()
        tracer.install(monkeypatch, everybody_is_there)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)  # what handles the thread's end may raise too
        monkeypatch.setattr("tests.runtime.models.second_family.small_pictures.StepRunner", Device)
        monkeypatch.setattr(
            "kestrel_runtime.engine.build.new_probes", lambda _: [prepared("probe"), prepared("probe")]
        )
        monkeypatch.setattr("kestrel_runtime.engine.build.LibraryMasks", Masks)
        for pause in ("_STARTING_S", "_QUIET_S"):
            monkeypatch.setattr(engine_loop, pause, 0.0)  # captures begin as soon as nothing is left to do
        preparations = Preparations(monkeypatch)
        monkeypatch.setattr(Preprocessor, "decode_again", lambda _, item: decoded_again(item))
        engine = LocalEngine(
            loaded,
            EngineConfig(model="", num_kv_pages=64, max_batch_size=5, max_prefill_tokens=6),
            flight_record=Path(folder) / "steps",
        )
        if scenario == "recovers":
            engine.isolate(["short"])
        loop: EngineLoop = vars(engine)["_loop"]
        device: Device = vars(loop)["_runner"]
        device.scenario = scenario
        sequences = [
            prepared("first", 1),
            prepared("second", 1),
            prepared("long", 30),
            prepared("poison 1"),
            prepared("poison 2"),
            prepared("poison 3"),
            prepared("leaving", 12),
            prepared("short", 1),
            prepared("image", has_image=True),
            prepared("parser", is_broken=True),
            prepared("forgotten image", has_image=True),
            prepared("lost image", has_image=True),
            prepared("late"),
        ]
        for item in sequences[-3:-1]:  # their pages were cached when they were prepared
            item.images[0].pixels, item.decode_job = None, item.request.fingerprint
        sequences[-1].clock.deadline = 0.0
        if scenario == "three in a row":
            sequences.sort(key=lambda item: not item.request.fingerprint.startswith("poison"))
        if scenario == "restricted":
            sequences = [prepared(name, 30) for name in ("long", "stuck", "other", "leaving")]
            for item in sequences[:2]:
                item.request.matcher = cast(Any, item.request.fingerprint)
            sequences[2].request.end_check = Checks()
        if scenario == "adapters":
            names = ("long", "replaced", "lost adapter", "overflowing", "leaving", "other")
            sequences = [prepared(name, 30) for name in names]
            for item in sequences[:-1]:
                item.adapter = Adapter(item.request.fingerprint, is_reclaimed=item.request.fingerprint == "leaving")
            vars(loop)["_lease_adapter"] = leased_again
        if scenario == "embeddings":
            sequences = [prepared("long", 30), *map(reading, ("embedded", "infinite", "leaving"))]
        streams: dict[str, Stream] = {}
        for item in sequences:
            streams[item.request.fingerprint], future = preparations.of_next(engine)
            future.set_result(item)

        def on_second_launch() -> None:
            loop.cancel(streams["leaving"])
            if scenario == "adapters":
                for item in sequences[:3]:
                    cast(Adapter, item.adapter).is_reclaimed = True
                loop.reclaim_adapters()

        device.on_second_launch = on_second_launch
        has_captured = threading.Event()
        captures = iter((True, False))

        def capture() -> bool:
            """Something comes in during the first capture; after it, none is wanted."""
            is_wanted = next(captures, False)
            if is_wanted:
                loop.reclaim_adapters()
            else:
                has_captured.set()
            return is_wanted

        device.on_capture_wanted = capture
        streams["gone"], future = preparations.of_next(engine)
        future.set_running_or_notify_cancel()
        streams["gone"].cancel()
        future.set_result(prepared("gone"))
        streams["unprepared"], _ = preparations.of_next(engine)
        clearing = asyncio.ensure_future(engine.clear_cache())
        await asyncio.sleep(0)  # until it is asked for
        ends = {
            name: asyncio.ensure_future(end_of(item, is_streamed=name == "long")) for name, item in streams.items()
        }
        # Calls of a caller that has left wait only for the end of the engine.
        others = [ends[name] for name in ends if name not in ("leaving", "unprepared")]
        everybody_is_there.set()
        try:
            await asyncio.wait(others, timeout=MAX_WAIT_S)
            assert all(item.done() for item in others), f"a caller waits forever after {tracer}"
            await asyncio.wait([clearing], timeout=MAX_WAIT_S)
            assert isinstance(clearing.exception(), NoneType | EngineUnavailable), "a removal is answered too"
            while engine.status is not EngineStatus.DEAD and not has_captured.is_set():
                await asyncio.to_thread(has_captured.wait, 0.05)
            with contextlib.suppress(EngineUnavailable):  # the thread is behind the capture then, or has ended
                await asyncio.wait_for(engine.clear_cache(), MAX_WAIT_S)
            status = engine.status
            if status is EngineStatus.DEAD:
                await asyncio.wait(ends.values(), timeout=MAX_WAIT_S)
                assert all(item.done() for item in ends.values()), f"who was in preprocessing waits after {tracer}"
                with pytest.raises(EngineUnavailable):
                    await engine.submit(Query("?")).result()
            ended = time.monotonic()
        finally:
            engine.close()
        assert engine.has_ended
        await asyncio.wait(ends.values(), timeout=MAX_WAIT_S)
        assert all(item.done() for item in ends.values()), "closing leaves a caller waiting"
        assert isinstance(await ends["unprepared"], EngineUnavailable)
        delay_s = 0.0 if tracer.raised_at is None else ended - tracer.raised_at
        return Run({name: await end for name, end in ends.items()}, status, delay_s)


def lines_of_the_engine_thread() -> set[Line]:
    """Where each statement begins that a turn of the loop and its isolation may pass."""
    elsewhere = {"__init__", "start", "add", "cancel", "num_waiting", "num_active", "tokens_per_second"}
    elsewhere |= {"requests_per_second"}
    elsewhere |= {"stop", "join", "activities", "in_flight", "finish", "forget_cached", "reclaim_adapters"}
    elsewhere |= {"num_captures_awaited"}
    found: set[Line] = set()
    for owner, module in ((EngineLoop, engine_loop), (Isolation, isolation)):
        file = str(module.__file__)
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for function in classes[owner.__name__].body:
            if isinstance(function, ast.FunctionDef) and function.name not in elsewhere:
                nodes = [node for part in function.body for node in ast.walk(part)]
                found |= {(file, node.lineno) for node in nodes if isinstance(node, ast.stmt) and _is_passed(node)}
    return found


def _is_passed(statement: ast.stmt) -> bool:
    """Whether it does something: no docstring, no `try`."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not isinstance(statement, ast.Try) and not is_text


async def lines_by_scenario(loaded: LoadedModel) -> dict[Line, str]:
    """Each line that the engine thread passes, with the first scenario that leads there."""
    found: dict[Line, str] = {}
    for scenario in SCENARIOS:
        tracer = Tracer()
        await play(loaded, tracer, scenario)
        found = {**dict.fromkeys(tracer.lines, scenario), **found}
    return found


@pytest.fixture(scope="module")
def passed(loaded: LoadedModel) -> dict[Line, str]:
    """The lines that the engine thread passes, found once."""
    return asyncio.run(lines_by_scenario(loaded))


def test_the_scenarios_pass_through_every_line_of_the_loop_and_of_isolation(passed: dict[Line, str]) -> None:
    assert lines_of_the_engine_thread() - passed.keys() == set()


async def test_without_a_fault_every_caller_gets_an_answer(loaded: LoadedModel) -> None:
    run = await play(loaded, Tracer(), "recovers")
    kinds = {name: type(end) for name, end in run.ends.items()}
    assert run.status is EngineStatus.SERVING
    assert kinds["long"] is kinds["short"] is kinds["image"] is Finished
    assert {kinds[name] for name in kinds if name.startswith("poison")} == {InternalError}
    assert (kinds["parser"], kinds["late"]) == (InternalError, DeadlineExceeded)
    run = await play(loaded, Tracer(), "embeddings")
    assert {name: type(run.ends[name]) for name in ("long", "embedded", "infinite")} == {
        "long": Finished,
        "embedded": Finished,
        "infinite": NumbersOverflowed,
    }


@pytest.mark.parametrize("part", range(4))
async def test_whatever_raises_at_any_line_every_caller_is_told_within_a_second(
    loaded: LoadedModel, passed: dict[Line, str], part: int
) -> None:
    kinds = itertools.cycle(KINDS)
    delays: list[float] = []
    statuses: Counter[EngineStatus] = Counter()
    for number, (line, scenario) in enumerate(sorted(passed.items())):
        kind = next(kinds)
        if number % 4 != part:
            continue
        tracer = Tracer(line, kind("raised by the test"))
        run = await play(loaded, tracer, scenario)
        where = f"{kind.__name__} at {line}"
        assert tracer.raised_at is not None, where
        if run.status is EngineStatus.DEAD:
            unexpected = {name: end for name, end in run.ends.items() if not isinstance(end, FATES)}
            assert unexpected.keys() <= {"gone"}, where
            assert isinstance(run.ends["leaving"], EngineUnavailable | InternalError), where
        else:
            assert isinstance(tracer.error, Exception), f"survived {where}"
        statuses[run.status] += 1
        delays.append(run.delay_s)
    assert statuses[EngineStatus.DEAD] > 0.6 * statuses.total()
    # All of them, but for what a busy machine may hold up.
    assert sorted(delays)[int(0.95 * len(delays))] < 1.0
