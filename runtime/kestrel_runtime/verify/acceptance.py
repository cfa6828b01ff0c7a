"""Accepts a checkpoint: compares one precision after another with recorded answers, and measures the speed.

Float32 must reproduce tensors and answers, shorter formats only tensors: their answers are only counted, because
one rounding may change a greedy answer.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError, KestrelError
from kestrel_runtime.api.requests import CachePolicy, Query, Request, RequestOptions, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.family import Case
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.verify.answers import Agreement
from kestrel_runtime.verify.recording import nudge
from kestrel_runtime.verify.reference_fixture import AnsweredCall, ReferenceFixture

TIMED_TOKENS = 16
"""The most tokens of an answer whose speed is measured."""


class Verdict(StrEnum):
    """The result of an acceptance."""

    PASSED = "passed"
    FAILED = "failed"
    INCOMPLETE = "incomplete"
    """A part could not be compared; the other parts do not differ."""

    @classmethod
    def of(cls, results: Sequence[PrecisionResult]) -> Verdict:
        """Returns the verdict on all precisions together."""
        if any(result.failures for result in results):
            return cls.FAILED
        was_compared = any(result.cases or result.agreement.num_answers for result in results)
        if not was_compared or any(result.problems for result in results):
            return cls.INCOMPLETE
        return cls.PASSED


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a closed loop: each of `num_callers` sends its next request once it has its answer."""

    num_callers: int
    num_requests: int
    requests_per_s: float
    tokens_per_s: float
    p50_s: float
    """The median duration of a request."""


@dataclass(frozen=True, slots=True)
class PrecisionResult:
    """The comparison of one precision with the reference."""

    name: str
    setup: str
    """The device, the data types and the backends."""
    is_exact: bool
    """True if everything was computed in float32, so that answers must be equal."""
    cases: tuple[Case, ...]
    """Comparisons of tensors, pixels and prompts."""
    answers: tuple[AnsweredCall, ...]
    uncertain: frozenset[int]
    """The indices of answers that change with the last bits of the weights. These answers are not compared."""
    speeds: tuple[Speed, ...]
    problems: tuple[str, ...]
    """The parts that could not be compared, and why."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """The options that the engine ran with, by name; empty if none could start."""

    @property
    def failures(self) -> list[str]:
        """The differences between model and reference, and the requests that only the reference answers."""
        failed = [f"{case.name}: {case.complaint}" for case in self.cases if case.complaint is not None]
        for place, call in enumerate(self.answers):
            if call.complaint and (call.answer is None or (self.is_exact and place not in self.uncertain)):
                failed.append(f"{call.name}: {call.complaint}")
        return failed

    @property
    def agreement(self) -> Agreement:
        """The agreement of the answers with the reference's."""
        return Agreement.of(
            (call.answer or {}, call.call["expect"]) for call in self.answers if "expect" in call.call
        )


def check_precision(
    folder: Path, name: str, config: EngineConfig, *, speed_s: float, report: Callable[[str], None]
) -> PrecisionResult:
    """Compares the model of `config` with the answers recorded in `folder`, and measures its speed.

    The speed is measured for about `speed_s` seconds with one caller, and again with as many as a batch holds.
    `report` gets a line for each stage. Raises `CheckpointError` if the model cannot be loaded.
    """
    cases: list[Case] = []
    answers: list[AnsweredCall] = []
    speeds: list[Speed] = []
    problems: list[str] = []
    settings: Mapping[str, str] = {}
    uncertain: frozenset[int] = frozenset()
    _free_memory()
    report("loading")
    fixture = ReferenceFixture(folder, config, has_checkpoint=False)
    is_exact, setup = fixture.is_exact, _setup(fixture)
    report("comparing tensors")
    try:
        cases.extend(fixture.tensor_cases())
    except torch.OutOfMemoryError:
        problems.append("tensors were not compared: the memory of the device is too small for it")
    _free_memory()
    try:
        report("comparing answers")
        serving = replace(fixture.config, num_kv_pages=config.num_kv_pages)
        engine = LocalEngine(fixture.loaded, serving, owns_model=True)
        try:
            settings = (engine.info.chosen or config).described()
            answers = _without_unsupported(asyncio.run(fixture.answers(engine)), engine)
            report("measuring the speed")
            speeds = asyncio.run(_speeds(engine, _timed_requests(fixture, folder), speed_s))
        finally:
            engine.close()
        differing = {place for place, call in enumerate(answers) if call.complaint and call.answer is not None}
        if is_exact and differing:
            del engine
            _free_memory()
            report("asking again with slightly changed weights where answers differ")
            uncertain = _uncertain(fixture, serving, answers) & differing
    except torch.OutOfMemoryError:
        problems.append("answers or speed: the memory of the device is too small")
    except (CheckpointError, KestrelError) as error:
        problems.append(f"answers or speed: {error}")
    return PrecisionResult(
        name, setup, is_exact, tuple(cases), tuple(answers), uncertain, tuple(speeds), tuple(problems), settings
    )


def _setup(fixture: ReferenceFixture) -> str:
    model = fixture.loaded.model
    chosen = fixture.config.resolved(model.device.type)
    dtype = str(model.dtype).removeprefix("torch.")
    cache = dtype if fixture.config.kv_dtype == "auto" else fixture.config.kv_dtype
    return (
        f"{model.device.type}, {dtype}, text backend {chosen.text_backend}, "
        f"vision backend {chosen.vision_backend}, key-value cache in {cache}"
    )


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _without_unsupported(answers: Iterable[AnsweredCall], engine: LocalEngine) -> list[AnsweredCall]:
    """Leaves out calls of skills that neither the model nor the reference has."""
    return [call for call in answers if call.call["skill"] in engine.info.skills or "expect" in call.call]


def _uncertain(fixture: ReferenceFixture, config: EngineConfig, answers: Sequence[AnsweredCall]) -> frozenset[int]:
    """Returns the indices of answers that differ when the last bits of the weights change."""
    loaded = LoadedModel.load(config)
    nudge(loaded)
    engine = LocalEngine(loaded, config, owns_model=True)
    try:
        nudged = _without_unsupported(asyncio.run(fixture.answers(engine)), engine)
    finally:
        engine.close()
    pairs = enumerate(zip(answers, nudged, strict=True))
    return frozenset(place for place, (before, after) in pairs if before.answer != after.answer)


def _timed_requests(fixture: ReferenceFixture, folder: Path) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TIMED_TOKENS)
    options = RequestOptions(cache=CachePolicy.BYPASS)
    return [
        Query(entry["query_prompt"], (folder / entry["image"]).read_bytes(), sampling=sampling, options=options)
        for entry in fixture.expected["images"]
    ]


async def _speeds(engine: LocalEngine, requests: Sequence[Request], duration_s: float) -> list[Speed]:
    numbers = dict.fromkeys((1, engine.info.max_batch_size))
    return [await _closed_loop(engine, requests, number, duration_s) for number in numbers] if requests else []


async def _closed_loop(
    engine: LocalEngine, requests: Sequence[Request], num_callers: int, duration_s: float
) -> Speed:
    turns = itertools.cycle(requests)
    durations_s: list[float] = []
    num_tokens = 0

    async def ask() -> float:
        nonlocal num_tokens
        begun = time.monotonic()
        finished = await engine.submit(next(turns)).result()
        num_tokens += finished.usage.num_output_tokens
        durations_s.append(time.monotonic() - begun)
        return time.monotonic()

    async def call(until: float) -> None:
        while await ask() < until:
            pass

    await asyncio.gather(*(ask() for _ in range(num_callers)))  # not counted: it may compile and capture
    durations_s.clear()
    num_tokens = 0
    begun = time.monotonic()
    await asyncio.gather(*(call(begun + duration_s) for _ in range(num_callers)))
    elapsed_s = time.monotonic() - begun
    return Speed(
        num_callers,
        len(durations_s),
        len(durations_s) / elapsed_s,
        num_tokens / elapsed_s,
        statistics.median(durations_s),
    )
