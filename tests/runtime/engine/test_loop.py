"""The engine's thread, turned by hand one step at a time."""

import asyncio
import threading
import time
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Event, Finished, FinishReason, Started, TextDelta
from kestrel_runtime.api.requests import Caption, Priority, Query, Request, SamplingParams
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine import loop as loop_module
from kestrel_runtime.engine.isolation import Isolation, new_probes
from kestrel_runtime.engine.loop import EngineLoop, InFlightStep, RecentRate, events_after
from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.fairness.queue_admission import Cost, QueueAdmission, QueueLimits
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.output.output_parser import Token, TokenRule
from kestrel_runtime.scheduling.batch import Batch, Chunk
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.page_manager import PageManager, StepId
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import SequenceClock, SequenceState, TokenSequence
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.fake_runner import FakeHandle, FakeRunner
from tests.runtime.preprocessors import new_preprocessor
from tests.runtime.sequences import RuleParser, ShortParser, blank_crops, new_sequence

IMAGE = (MD3_SMALL / "image_0_500x400.png").read_bytes()


class Bench:
    """A loop whose thread never runs; the test calls `step`."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = EngineConfig(model="")
        self.pages = PageManager(512, config.page_size)
        scheduler = Scheduler(self.pages, max_batch_size=8, max_prefill_tokens=64, max_crops_per_step=3)
        prepared = loaded.family.prepare(loaded.model, config, StepBounds(8, 64, 3), owns_model=False)
        runner, poison_requests = prepared.new_step_runner(512, 0), PoisonRequests()
        self.statuses: list[str] = []
        isolation = Isolation(
            scheduler,
            runner,
            poison_requests,
            new_probes=lambda: new_probes(self._preprocessor),
            on_restart=lambda: self.statuses.append("recovering"),
            on_restarted=lambda: self.statuses.append("serving"),
        )
        self.admission = QueueAdmission(QueueLimits(100, 10**9, 10**6))
        self.loop = EngineLoop(scheduler, runner, isolation, self.admission)
        self._preprocessor = new_preprocessor(loaded, poison_requests, max_context=4096)

    def add(self, request: Request, deadline: float | None = None) -> Stream:
        stream = Stream()
        sequence = self._preprocessor.prepare(request, SequenceClock(time.monotonic()))
        sequence.clock.deadline = deadline
        stream.on_cancel(lambda: self.loop.cancel(stream))
        self.admission.enter(stream, Cost("", Priority.NORMAL, Priority.NORMAL, 0, 1), time.monotonic())
        self.loop.add(sequence, stream)
        return stream

    async def events(self, stream: Stream) -> list[object]:
        """What has been posted to a stream so far."""
        posted: list[object] = []
        stream.loop.call_soon(stream.cancel)  # runs after what the steps have posted
        async for event in stream:
            posted.append(event)
        return posted


@pytest.fixture
def bench(loaded: LoadedModel) -> Bench:
    return Bench(loaded)


def tell(num_tokens: int, question: str = "hello") -> Query:
    return Query(question, sampling=SamplingParams(temperature=30.0, top_p=1.0, max_tokens=num_tokens, seed=2))


async def test_a_step_samples_one_token_for_each_sequence(bench: Bench) -> None:
    streams = [bench.add(tell(3)) for _ in range(4)]
    for _ in range(3):
        bench.loop.run_turn()
    for stream in streams:
        finished = await stream.result()
        assert finished.usage.num_output_tokens == 3
    assert bench.pages.num_held == 0
    assert len(bench.admission) == 0


async def test_a_request_is_counted_once_wherever_it_is(bench: Bench) -> None:
    def counts() -> tuple[int, int]:
        return bench.loop.num_waiting, bench.loop.num_active

    stream = bench.add(tell(20))
    assert counts() == (1, 0)
    bench.loop.run_turn()
    assert counts() == (0, 1)
    stream.cancel()  # as where its deadline passes
    assert counts() == (0, 1), "the engine thread has not heard of it"
    bench.loop.run_turn()
    assert counts() == (0, 0)


async def test_a_newcomer_joins_a_running_batch_and_leaves_it_first(bench: Bench) -> None:
    old = bench.add(tell(20))
    for _ in range(5):
        bench.loop.run_turn()
    young = bench.add(tell(2))
    for _ in range(2):
        bench.loop.run_turn()
    assert (await young.result()).usage.num_output_tokens == 2
    assert bench.loop.num_active == 1
    assert sum(event.num_tokens for event in await bench.events(old) if isinstance(event, TextDelta)) > 5


async def test_a_long_prefill_does_not_hold_up_those_who_decode(bench: Bench) -> None:
    decoding = bench.add(tell(40))
    bench.loop.run_turn()
    picture = bench.add(Caption(IMAGE, sampling=SamplingParams(max_tokens=1)))
    for _ in range(3):  # nine crops, three a step; the prompt follows the last of them
        bench.loop.run_turn()
    long = bench.add(tell(1, "word " * 80))
    for _ in range(2):
        bench.loop.run_turn()
    drawn = [event for event in await bench.events(decoding) if isinstance(event, TextDelta)]
    assert isinstance((await picture.result()), Finished)
    assert sum(delta.num_tokens for delta in drawn) >= 5  # one a step, but for bytes of unfinished characters
    assert not long.over.done()  # its prompt is longer than two steps may carry


async def test_beside_a_prompt_on_its_way_others_get_their_tokens(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRunner, "is_asynchronous", True)
    monkeypatch.setattr(StepHandle, "is_complete", lambda _: False)
    decoding = bench.add(tell(40))
    for _ in range(3):
        bench.loop.run_turn()
        bench.loop._wait_for_work()
    young = bench.add(tell(5))
    for _ in range(20):
        bench.loop.run_turn()
    drawn = [event for event in await bench.events(decoding) if isinstance(event, TextDelta)]
    assert sum(delta.num_tokens for delta in drawn) > 10
    monkeypatch.setattr(StepHandle, "is_complete", lambda _: True)
    for _ in range(20):
        bench.loop.run_turn()
    assert (await young.result()).usage.num_output_tokens == 5


async def test_a_cancelled_prompt_keeps_its_pages_until_its_step_has_completed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRunner, "is_asynchronous", True)
    monkeypatch.setattr(StepHandle, "is_complete", lambda _: False)
    bench.add(tell(40))
    for _ in range(3):
        bench.loop.run_turn()
    others = bench.pages.num_held
    young = bench.add(tell(5, "word " * 20))
    bench.loop.run_turn()
    held = bench.pages.num_held - others
    young.cancel()
    bench.loop.run_turn()
    assert bench.loop.num_active == 1
    assert bench.pages.num_held >= others + held > others
    monkeypatch.setattr(StepHandle, "is_complete", lambda _: True)
    bench.loop.run_turn()
    assert bench.pages.num_held < others + held


async def test_a_cancelled_sequence_is_dropped_before_the_next_step(bench: Bench) -> None:
    stream = bench.add(tell(50))
    bench.loop.run_turn()
    assert bench.pages.num_held > 0
    stream.cancel()
    bench.loop.run_turn()
    assert bench.pages.num_held == 0
    assert bench.loop.num_active == 0


async def test_a_deadline_that_has_passed_ends_a_request_before_it_costs_anything(bench: Bench) -> None:
    stream = bench.add(tell(50), deadline=time.monotonic() - 1)
    bench.loop.run_turn()
    assert bench.pages.num_held == 0
    with pytest.raises(Exception, match="deadline"):
        await stream.result()


async def test_the_first_event_is_the_start_and_carries_the_prompts_usage(bench: Bench) -> None:
    stream = bench.add(tell(5))
    bench.loop.run_turn()
    first = (await bench.events(stream))[0]
    assert isinstance(first, Started)
    assert first.usage.num_output_tokens == 0
    assert first.usage.num_input_tokens > 4


async def test_who_waits_for_the_result_is_sent_nothing_before_it(bench: Bench) -> None:
    stream, other = bench.add(tell(3)), bench.add(tell(3))
    delivered: list[list[Event]] = []
    deliver = stream.deliver

    def note(events: list[Event], error: KestrelError | None = None) -> None:
        delivered.append(events)
        deliver(events, error)

    stream.deliver = note
    result = asyncio.ensure_future(stream.result())
    await asyncio.sleep(0)  # it waits
    for _ in range(3):
        bench.loop.run_turn()
    finished = await result
    assert finished.usage.num_output_tokens == 3
    assert [events[-1] for events in delivered] == [finished]
    assert isinstance((await bench.events(other))[0], Started)


async def test_the_rates_count_tokens_and_whole_answers_of_the_last_seconds(bench: Bench) -> None:
    for _ in range(4):
        bench.add(tell(5))
    for _ in range(4):
        bench.loop.run_turn()
    assert bench.loop.requests_per_second() == 0
    bench.loop.run_turn()
    assert bench.loop.tokens_per_second() == pytest.approx(4 * 5 / 5.0)
    assert bench.loop.requests_per_second() == pytest.approx(4 / 5.0)


async def test_graphs_are_captured_when_there_has_been_no_work_for_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_QUIET_S", 0.0)
    wanted = [True, True, False]
    monkeypatch.setattr(bench.loop._runner, "capture_wanted", lambda: wanted.pop(0))
    stream = bench.add(tell(1))
    bench.loop.run_turn()
    await stream.result()
    bench.loop._wait_for_work()
    assert wanted == []
    assert bench.loop.num_captures_awaited == 0
    bench.loop.stop()  # nothing is wanted until another step has run: this waits for the inbox alone
    assert not bench.loop._wait_for_work()


async def test_no_graph_is_captured_while_the_port_opens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_STARTING_S", 3600.0)
    monkeypatch.setattr(loop_module, "_QUIET_S", 0.0)
    num_captures: list[int] = []
    monkeypatch.setattr(bench.loop._runner, "capture_wanted", lambda: num_captures.append(1))
    bench.loop.start()
    assert (await bench.add(tell(1)).result()).usage.num_output_tokens == 1
    bench.loop.stop()
    assert bench.loop.join(60.0)
    assert num_captures == []


async def test_a_request_that_comes_during_a_capture_waits_for_that_one_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_QUIET_S", 0.0)
    first = bench.add(tell(1))
    bench.loop.run_turn()
    await first.result()
    streams: list[Stream] = []

    def capture_wanted() -> bool:
        streams.append(bench.add(tell(1)))
        return True

    monkeypatch.setattr(bench.loop._runner, "capture_wanted", capture_wanted)
    bench.loop._wait_for_work()
    assert bench.loop.num_captures_awaited == len(streams) == 1
    bench.loop.run_turn()
    assert (await streams[0].result()).usage.num_output_tokens == 1


def test_a_step_is_named_by_its_kind_its_id_and_its_sequences() -> None:
    first, second = new_sequence(3), new_sequence(3)
    first.request.fingerprint = "query-abc"
    for batch, expected in (
        (Batch.of_prefill(prefill=[Chunk(first, 0, 3)]), "step 7, a prefill step of query-abc"),
        (Batch.of_decode([first, second]), f"step 7, a decode step of query-abc, {second.id}"),
    ):
        handle: Any = FakeHandle(FakeRunner(), batch)
        assert str(InFlightStep(StepId(7), batch, handle)) == expected


def test_the_first_token_starts_the_answer_and_a_full_context_ends_it() -> None:
    sequence = new_sequence(3, num_image_tokens=4, max_context=9)
    sequence.request.parser = RuleParser(TokenRule())
    sequence.tokens.append(Token(7))
    (started,) = events_after(sequence, 1.0)
    assert isinstance(started, Started)
    assert (started.usage.num_input_tokens, started.usage.num_output_tokens) == (7, 0)
    sequence.tokens.append(Token(8))
    (finished,) = events_after(sequence, 3.0)
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.LENGTH
    assert (finished.usage.num_output_tokens, finished.timing.decode_s) == (2, 2.0)


class RecordingRunner(FakeRunner):
    """Notes at each launch of a prefill step which decode steps were in flight, that is, not waited for yet."""

    def __init__(self) -> None:
        super().__init__()
        self.decodes_in_flight: list[FakeHandle] = []
        self.seen: list[tuple[Batch, set[FakeHandle], set[FakeHandle]]] = []
        """Prefill steps: what each waits for, and the last decode steps in flight of sequences that had left."""
        self.on_wait = self._waiting

    def launch(self, batch: Batch, after: Iterable[FakeHandle] = ()) -> FakeHandle:
        step = super().launch(batch)
        if batch.kind == "decode":
            self.decodes_in_flight.append(step)
        else:
            last_of = {sequence: item for item in self.decodes_in_flight for sequence in item.batch.decode}
            tails = {item for sequence, item in last_of.items() if sequence.state is SequenceState.FINISHED}
            self.seen.append((batch, set(after), tails))
        return step

    def _waiting(self, step: FakeHandle) -> None:
        if step in self.decodes_in_flight:
            self.decodes_in_flight.remove(step)


class AnyToken:
    """The `TokenMatcher` of a constraint that allows everything."""

    def take(self, generated: Iterable[Token]) -> None: ...


def new_loop(runner: Any) -> EngineLoop:
    scheduler = Scheduler(PageManager(64, 4), max_batch_size=4, max_prefill_tokens=64, max_crops_per_step=8)
    isolation = Isolation(
        scheduler, runner, PoisonRequests(), new_probes=list, on_restart=lambda: None, on_restarted=lambda: None
    )
    admission = QueueAdmission(QueueLimits(100, 10**9, 10**6))
    return EngineLoop(scheduler, runner, isolation, admission, make_masks=lambda asked: [None] * len(asked))


async def test_no_token_is_sampled_that_a_parser_does_not_take() -> None:
    runner = FakeRunner()
    sampled: list[TokenSequence] = []
    runner.on_launch = lambda batch: sampled.extend(batch.sampled)
    loop = new_loop(runner)
    limits = [1, 2, 3, 7]
    sequences = [new_sequence(6, max_context=6 + limit) for limit in limits]
    for sequence, limit in zip(sequences, limits, strict=True):
        sequence.request.parser = ShortParser(limit)
        loop.add(sequence, Stream())
    for _ in range(20):
        loop.run_turn()
    assert [sampled.count(sequence) for sequence in sequences] == limits


@pytest.mark.parametrize("every", [None, 1, 3], ids=["no masks", "all with masks", "some with masks"])
async def test_a_prefill_step_waits_for_the_tail_steps_and_for_no_other_decode_step(every: int | None) -> None:
    runner = RecordingRunner()
    loop = new_loop(runner)
    for number in range(60):
        sequence = new_sequence(6)
        if every is not None and number % every == 0:
            # Before a step with masks is sampled, those before it are completed, by which sequences leave.
            sequence.request.matcher = AnyToken()
        sequence.request.parser = ShortParser(3 + number % 5)
        loop.add(sequence, Stream())
        for _ in range(1 + number % 4):
            loop.run_turn()
    for batch, after, tails in runner.seen:
        assert all(chunk.start == 0 for chunk in batch.prefill)
        assert after == tails
    assert sum(bool(tails) for _, _, tails in runner.seen) > 5
    assert sum(not tails for _, _, tails in runner.seen) > 5


class HeldHandle(FakeHandle):
    """A prompt on its way until the test says so."""

    def __init__(self, runner: FakeRunner, batch: Batch) -> None:
        super().__init__(runner, batch)
        self._over = threading.Event()
        self.is_complete = self._over.is_set
        self.end = self._over.set
        self.done = self

    def synchronize(self) -> None:
        assert self._over.wait(60.0)

    def wait(self) -> list[Token]:
        self.synchronize()
        return super().wait()


class HoldingRunner(FakeRunner):
    """Ends each prompt when the test says so, and other steps at once."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: SimpleQueue[HeldHandle] = SimpleQueue()

    def launch(self, batch: Batch, after: Iterable[FakeHandle] = ()) -> FakeHandle:
        if batch.kind == "decode":
            return super().launch(batch)
        handle = HeldHandle(self, batch)
        self._begun.put(handle)
        return handle

    async def begun(self) -> HeldHandle:
        """Waits for the next prefill step."""
        return await asyncio.to_thread(self._begun.get, timeout=60.0)


def ask_for(
    loop: EngineLoop, num_tokens: int, *, deadline: float | None = None, **properties: Any
) -> asyncio.Future[None]:
    """Sends a request for so many tokens; the future ends with its answer."""
    sequence, stream = new_sequence(6, **properties), Stream()
    sequence.clock.deadline = deadline
    sequence.request.parser = ShortParser(num_tokens)
    loop.add(sequence, stream)
    return stream.over


async def test_a_prompt_on_its_way_holds_up_neither_a_new_request_nor_an_answer_that_is_there() -> None:
    runner = HoldingRunner()
    loop = new_loop(runner)
    loop.start()
    first = ask_for(loop, 3)
    first_step = await runner.begun()
    second = ask_for(loop, 3)
    second_step = await runner.begun()
    first_step.end()
    await asyncio.wait_for(first, 60.0)
    assert not second.done()
    second_step.end()
    await asyncio.wait_for(second, 60.0)
    loop.stop()
    assert loop.join(60.0)


async def test_few_requests_that_come_while_images_are_encoded_begin_together() -> None:
    runner = HoldingRunner()
    loop = new_loop(runner)
    loop.start()
    answers = [ask_for(loop, 3, num_image_tokens=4, pixels=blank_crops(2))]
    first_step = await runner.begun()
    for _ in range(2):
        answers.append(ask_for(loop, 3))
        for _ in range(2):  # dropped by the turn that takes it, and so the turn that took the request is over
            await asyncio.wait_for(ask_for(loop, 3, deadline=0.0), 60.0)
    first_step.end()
    second_step = await runner.begun()
    assert len(second_step.batch.prefill) == 2
    second_step.end()
    await asyncio.wait_for(asyncio.gather(*answers), 60.0)
    loop.stop()
    assert loop.join(60.0)


async def test_where_many_requests_run_others_begin_beside_a_step_with_images(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop_module, "_NUM_MANY", 1)
    runner = HoldingRunner()
    loop = new_loop(runner)
    loop.start()
    answers = [ask_for(loop, 3, num_image_tokens=4, pixels=blank_crops(2))]
    first_step = await runner.begun()
    answers.append(ask_for(loop, 3))
    second_step = await runner.begun()
    first_step.end()
    second_step.end()
    await asyncio.wait_for(asyncio.gather(*answers), 60.0)
    loop.stop()
    assert loop.join(60.0)


def test_the_rate_counts_tokens_of_the_last_seconds_only() -> None:
    rate = RecentRate()
    rate.add(100.0, 10)
    rate.add(103.0, 20)
    assert rate.per_second(104.0) == pytest.approx(6.0)
    assert rate.per_second(106.0) == pytest.approx(4.0)
    assert rate.per_second(200.0) == 0.0
    rate.add(200.0, 5)
    assert rate.per_second(200.0) == pytest.approx(1.0)
