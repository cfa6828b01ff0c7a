"""The engine with CUDA graphs, of which any may fail to be captured: every answer is what it is without them."""

import asyncio
import dataclasses
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from msgspec import structs

from kestrel_ops import Kernels
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.events import Finished, Output, QueryOutput
from kestrel_runtime.api.requests import Detect, Point, Query, Request, SamplingParams
from kestrel_runtime.engine import loop as loop_module
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution import step_runner as runner_module
from kestrel_runtime.execution.buckets import PrefillSize, largest_prefill
from kestrel_runtime.execution.graph_capture import CapturedGraph, StreamCapture
from kestrel_runtime.execution.graph_policy import CapturedGraphs
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream import executor as executor_module
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.sampling import value_kinds
from kestrel_runtime.models.moondream.skills import SKILLS
from kestrel_runtime.output.output_parser import TokenRule
from tests.reference_fixtures import MD2_SMALL
from tests.runtime.fake_cuda import FakeStreamCapture
from tests.runtime.models.moondream.test_executor import CASES, MODELS, NUM_IMAGE_TOKENS, TEXT, Bench, written_out
from tests.runtime.models.moondream.tiny import random_model, tiny_config
from tests.runtime.noise import noise

SMALL_IMAGE = (MD2_SMALL / "image_1_100x80.png").read_bytes()
LOGGER = "kestrel_runtime.execution.graph_policy"
CONFIG = EngineConfig(model="", text_backend="fused", vision_backend="fused", max_batch_size=4, num_kv_pages=300)

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((17, 3.0), (0, -5.0)),
}
OVER = RuntimeError("CUDA error: operation failed due to a previous error during capture\nand a page of advice")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def requests() -> list[Request]:
    """Every kind of draw, alone and together, greedy and not."""
    drawn = [SamplingParams(temperature=5.0, max_tokens=4, seed=seed) for seed in range(4, 6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    return [
        Query("hello", sampling=greedy),
        Query("What is this?", SMALL_IMAGE, sampling=drawn[0]),
        Query("why?", SMALL_IMAGE, reasoning=True, sampling=drawn[1]),
        Query("who?", sampling=dataclasses.replace(drawn[0], top_k=9, min_p=0.01, **PENALTIES)),
        Query("when?", sampling=dataclasses.replace(drawn[1], logprobs=3)),
        Query("which?", sampling=drawn[0], constraint=Constraint(regex="[ab]{2,3}")),
        Point("copy", SMALL_IMAGE, max_objects=1),
        Detect("copy", SMALL_IMAGE, max_objects=1),
    ]


class Captures:
    """Makes the stream captures of an engine, which share failures, and remembers them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, failures: Iterable[Exception | None], *, in_place: bool = True
    ) -> None:
        """`in_place` as of `FakeStreamCapture`; a step that is not copied at once must not be overwritten."""
        self._in_place = in_place
        self.stream_captures: list[FakeStreamCapture] = []
        self._failures = iter(failures)
        choose = ExecutionConfig.of

        def with_graphs(*arguments: Any) -> ExecutionConfig:
            return dataclasses.replace(choose(*arguments), with_graphs=True, captures_prefill=True)

        monkeypatch.setattr(ExecutionConfig, "of", with_graphs)
        monkeypatch.setattr(runner_module, "StreamCapture", self._new_stream_capture)
        # The start captures nothing, which takes long on a CPU, so that all is captured in quiet times.
        monkeypatch.setattr(executor_module.MoondreamExecutor, "capture", lambda self: None)
        monkeypatch.setattr(loop_module, "_QUIET_S", 3600.0)  # which the tests say

    @property
    def num_tried(self) -> int:
        return sum(stream_capture.num_captures for stream_capture in self.stream_captures)

    def _new_stream_capture(self, stream: object) -> FakeStreamCapture:
        self.stream_captures.append(FakeStreamCapture(self._failures))
        self.stream_captures[-1].in_place = self._in_place
        return self.stream_captures[-1]


async def answers(engine: LocalEngine, times: int = 3) -> list[object]:
    """What the requests get one by one and together, so often that all is captured that can be."""
    outputs: list[Finished] = []
    for _ in range(times):
        outputs += [(await engine.submit(request).result()) for request in requests()]
        together = await asyncio.gather(*(engine.submit(request).result() for request in requests()))
        outputs += together
        await last_turn_ended(engine)
        use_quiet_time(engine._loop._runner)
    return [without_logprobs(finished.output) for finished in outputs]


def noted_eager(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that gets the key of all work that runs without a graph from now on."""
    eager: list[object] = []
    run = CapturedGraphs.run

    def noted(graphs: CapturedGraphs, key: object, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in graphs:
            eager.append(key)
        return run(graphs, key, work)

    monkeypatch.setattr(CapturedGraphs, "run", noted)
    return eager


def use_quiet_time(runner: StepRunner) -> None:
    """Do what an idle engine does after a while."""
    while runner.capture_wanted():
        pass


async def last_turn_ended(engine: LocalEngine) -> None:
    """Wait until the engine's thread has left the turn that ended the last answer, and freed its output.

    A quiet time is one of that thread. Pinned memory that another thread frees while its stream is captured makes
    torch raise "invalid argument" at the next allocation of pinned memory.
    """
    await engine.clear_cache("a namespace without requests")


def without_logprobs(output: Output) -> Output:
    """Rounding changes them, which depends on the batch."""
    return structs.replace(output, logprobs=None) if isinstance(output, QueryOutput) else output


@pytest.fixture(scope="module")
def wanted(shallow2: LoadedModel) -> list[object]:
    engine = LocalEngine(shallow2, CONFIG)
    try:
        return asyncio.run(answers(engine, times=1)) * 3
    finally:
        engine.close()


def at_random(seed: int) -> Iterator[Exception | None]:
    chance = random.Random(seed)
    while True:
        yield chance.choice([None, None, None, None, OVER, NO_MEMORY])


@pytest.mark.parametrize(
    ("failures", "looks_ahead"),
    [
        pytest.param(lambda: (), False, id="none"),
        pytest.param(lambda: itertools.repeat(OVER), False, id="invalid captures"),
        pytest.param(lambda: itertools.repeat(NO_MEMORY), False, id="no memory"),
        pytest.param(lambda: itertools.chain([None] * 5, itertools.repeat(NO_MEMORY)), False, id="no memory later"),
        pytest.param(lambda: at_random(3), True, id="at random, looking ahead"),
    ],
)
async def test_whatever_fails_to_be_captured_every_answer_is_right_and_no_request_is_isolated(
    shallow2: LoadedModel,
    wanted: list[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failures: Callable[[], Iterable[Exception | None]],
    looks_ahead: bool,
):
    captures = Captures(monkeypatch, failures(), in_place=not looks_ahead)
    monkeypatch.setattr(runner_module.StepRunner, "is_asynchronous", looks_ahead)
    statuses: list[EngineStatus] = []
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(shallow2, CONFIG)
        engine.on_status_change(statuses.append)
        try:
            assert await answers(engine) == wanted
            assert (engine.status, statuses) == (EngineStatus.SERVING, [])
            assert engine.load().num_used_pages == 0
        finally:
            engine.close()
    assert captures.num_tried > 5
    # One line for each key, and for each kind no more than a few; and nothing else was worth a warning.
    assert all("run without a CUDA graph" in record.message for record in caplog.records)
    keys = [record.message.partition(" run without")[0] for record in caplog.records]
    assert len(keys) == len(set(keys)) <= 8 * 4
    assert all("\n" not in record.message for record in caplog.records)
    # After the start nothing waits for the device.
    assert sum(stream_capture.num_releases for stream_capture in captures.stream_captures) == 0


async def test_graphs_are_captured_anew_after_a_restart(
    shallow2: LoadedModel, wanted: list[object], monkeypatch: pytest.MonkeyPatch
):
    captures = Captures(monkeypatch, ())
    engine = LocalEngine(shallow2, CONFIG)
    try:
        once = wanted[: len(wanted) // 3]
        assert await answers(engine, times=2) == once * 2
        before = captures.num_tried
        engine._loop._scheduler.preempt_all()  # nothing is under way; it forgets the cached pages
        engine._loop._runner.restart()
        assert await answers(engine, times=2) == once * 2
        assert captures.num_tried > before
        again = await engine.submit(Query("hi", sampling=SamplingParams(max_tokens=2))).result()
        assert isinstance(again, Finished)
    finally:
        engine.close()


@pytest.mark.parametrize("case", CASES)
def test_usual_traffic_finds_its_graphs_captured_by_the_start(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    capture = executor_module.MoondreamExecutor.capture
    captures, (tokens, image), model = Captures(monkeypatch, ()), CASES[case], MODELS[2]
    monkeypatch.setattr(executor_module.MoondreamExecutor, "capture", capture)
    bench = Bench(model, batch=4, prefill=128, text_backend="fused", vision_backend="fused")
    with caplog.at_level(logging.INFO, logger="kestrel_runtime.models.moondream.executor"):
        bench.runner.capture()
    at_start = captures.num_tried
    assert f"captured {at_start} CUDA graphs" in caplog.text
    eager = noted_eager(monkeypatch)

    def generate() -> None:
        (generated,) = bench.generate(6, bench.add(tokens, image))
        assert generated == written_out(model, 6, tokens, image)
        rule = TokenRule(allowed=(5, 6), is_spatial=True)  # which draws coordinates and sizes
        bench.generate(3, bench.add(tokens, image, rule=rule, temperature=1.0))

    generate()
    # Prompts with references to places are rare: they run without a graph until their size has come again.
    assert [type(key).__name__ for key in eager] == (["_PromptKey"] * 2 if case == "places" else [])
    use_quiet_time(bench.runner)
    eager.clear()
    generate()
    assert eager == []
    num_tried = captures.num_tried
    assert num_tried > at_start
    use_quiet_time(bench.runner)
    assert captures.num_tried == num_tried


def test_decode_steps_have_graphs_of_layers_and_of_sampling_whatever_a_quiet_time_has_captured(
    monkeypatch: pytest.MonkeyPatch,
):
    capture = executor_module.MoondreamExecutor.capture
    Captures(monkeypatch, ())
    monkeypatch.setattr(executor_module.MoondreamExecutor, "capture", capture)
    bench = Bench(MODELS[2], batch=4, prefill=128, text_backend="fused", vision_backend="fused")
    bench.runner.capture()
    eager, is_quiet = noted_eager(monkeypatch), True
    while is_quiet:
        eager.clear()
        bench.generate(3, bench.add(TEXT), bench.add(TEXT))
        assert {type(key).__name__ for key in eager} <= {"_PromptKey"}
        is_quiet = bench.runner.capture_wanted()


def test_sampling_kinds_multiply_no_graphs_of_prefill(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    capture = executor_module.MoondreamExecutor.capture
    Captures(monkeypatch, ())
    monkeypatch.setattr(executor_module.MoondreamExecutor, "capture", capture)
    bench = Bench(MODELS[2], batch=4, prefill=128, text_backend="fused", vision_backend="fused")
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        bench.runner.capture()
        num_at_start = len(caplog.records)
        use_quiet_time(bench.runner)
    kinds = Counter(record.message.partition(" of ")[0] for record in caplog.records)
    sizes = PrefillSize.usual(
        NUM_IMAGE_TOKENS + 1,
        largest_prefill(128, 4, 100),
        max_tokens=128,
        max_prompts=4,
        max_context=400,
        shares_prefixes=False,
        cuts_at_share_points=False,
    )
    needs = len(executor_module._USUAL_NEEDS)
    assert num_at_start < sum(kinds.values()) / 2
    assert kinds["captured prefill steps"] == len(sizes) > 3
    assert kinds["captured first tokens"] == 2 * needs  # after one prompt and after up to 4
    assert kinds["captured decode steps"] == 3 * (2 + needs)  # layers for tokens with and without values, sampling


def test_a_span_longer_than_steps_may_be_runs_on_its_own_inputs_each_time(monkeypatch: pytest.MonkeyPatch):
    # Its fields are no place that a graph could read again.
    Captures(monkeypatch, ())
    model = random_model(tiny_config(crop_size=168))
    bench = Bench(model, batch=4, prefill=64, text_backend="fused", vision_backend="fused")
    num_image_tokens = model.config.text.prefix_attn - 1
    assert num_image_tokens > 128
    for seed in range(3):
        image = noise(40, 40, seed)
        (generated,) = bench.generate(3, bench.add(TEXT[:1], image, num_image_tokens=num_image_tokens))
        assert generated == written_out(model, 3, TEXT[:1], image)
        bench.add(TEXT)  # takes pages and a row, so that the next one gets others
        bench.step()


def test_the_draws_of_every_skill_alone_and_together_are_usual(shallow2: LoadedModel):
    config = shallow2.model.config
    found: set[int] = set()
    asked: list[Request] = [*requests(), Query("why?", SMALL_IMAGE)]
    for request in asked:
        grammar = SKILLS[request.skill].new_parser(request, shallow2.tokenizer, config).grammar
        found.add(value_kinds(grammar, config.tokenizer))
    together = {one | other for one in found for other in found}
    needs = executor_module._USUAL_NEEDS
    assert together == {own.value_kinds for own in needs if not own.is_restricted}
    assert len(set(needs)) == len(needs) == 2 * (len(together) + 1)  # constraints are for text


Work = Callable[[], torch.Tensor]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ON_A_GPU = EngineConfig(model=str(MD2_SMALL), device="cuda", dtype="float32", max_batch_size=4, num_kv_pages=300)
WAITS_FOR_THE_DEVICE = (("rotary_write_kv", "reference"), ("rotary_decode_attention", "reference"))


async def greedy_answers(engine: LocalEngine) -> list[object]:
    """As `answers`, of requests whose answers rounding does not change; asked often enough for late captures."""
    asked: list[Request] = [
        Query("hello", sampling=GREEDY),
        Query("What is this?", SMALL_IMAGE, sampling=GREEDY),
        Query("What is this?", SMALL_IMAGE, sampling=dataclasses.replace(GREEDY, **PENALTIES)),
        Query("which?", sampling=GREEDY, constraint=Constraint(regex="[ab]{2,3}")),
        Point("copy", SMALL_IMAGE, max_objects=2, sampling=SamplingParams(temperature=0.0)),
        Detect("copy", SMALL_IMAGE, max_objects=2, sampling=SamplingParams(temperature=0.0)),
    ]
    outputs: list[object] = []
    for _ in range(3):
        outputs += [(await engine.submit(request).result()).output for request in asked]
        together = await asyncio.gather(*(engine.submit(request).result() for request in asked))
        outputs += [finished.output for finished in together]
        await last_turn_ended(engine)
        use_quiet_time(engine._loop._runner)
    return outputs


def starved(
    capture: Callable[[StreamCapture, Work], CapturedGraph],
) -> Callable[[StreamCapture, Work], CapturedGraph]:
    """Captures that may not take a byte more than torch has at hand, which is not for them."""

    def without_memory(self: StreamCapture, run: Work) -> CapturedGraph:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
        try:
            return capture(self, run)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    return without_memory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("captures_at_start", [True, False], ids=["at the start", "in quiet times"])
@pytest.mark.parametrize("cause", ["waits for the device", "no memory", "nothing fails"])
async def test_on_a_gpu_captures_that_fail_change_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: str, captures_at_start: bool
):
    config = ON_A_GPU
    if cause == "waits for the device":
        config = dataclasses.replace(config, kernels=WAITS_FOR_THE_DEVICE)
        # Else these kernels are known to wait, and nothing is captured.
        monkeypatch.setattr(Kernels, "waiting_for_device", lambda _: [])
    loaded = LoadedModel.load(config)
    plain = LocalEngine(loaded, dataclasses.replace(config, cuda_graphs=False))
    try:
        wanted = await greedy_answers(plain)
    finally:
        plain.close()
    monkeypatch.setattr(loop_module, "_QUIET_S", 3600.0)
    if not captures_at_start:
        monkeypatch.setattr(executor_module.MoondreamExecutor, "capture", lambda self: None)
    if cause == "no memory":
        monkeypatch.setattr(StreamCapture, "capture", starved(StreamCapture.capture))
    statuses: list[EngineStatus] = []
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(loaded, config)
        engine.on_status_change(statuses.append)
        calls = {"synchronize": 0, "empty_cache": 0}
        for name in calls:
            original = getattr(torch.cuda, name)

            def counted(*given: object, name: str = name, original: Callable[..., None] = original) -> None:
                calls[name] += 1
                original(*given)

            monkeypatch.setattr(torch.cuda, name, counted)
        try:
            assert await greedy_answers(engine) == wanted
            assert (engine.status, statuses) == (EngineStatus.SERVING, [])
            captures = engine._loop._runner._graphs
            assert captures is not None
            graphs = captures.budget.num_graphs
            assert cause != "nothing fails" or engine.load().num_compilations_awaited == 0
        finally:
            engine.close()
    assert calls == {"synchronize": 0, "empty_cache": 0}
    # Without memory for captures the device cropper may have none either, while one is under way.
    lines = [record.message for record in caplog.records if "divided into crops in advance" not in record.message]
    assert all("run without a CUDA graph" in line for line in lines), lines
    assert len(lines) == len(set(lines))
    if cause == "waits for the device":
        assert graphs > 0  # encodings and first tokens
        assert any(line.startswith("decode steps") for line in lines)
        assert any(line.startswith("prefill steps") for line in lines)
    if cause == "no memory":
        assert graphs == 0
        assert any("out of memory" in line for line in lines)
    if cause == "nothing fails":
        assert lines == []
        assert graphs > 5
