"""A request about a known image costs the host numbers that are the same on every machine."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from kestrel_runtime.api import stream as stream_module
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.loop import EngineLoop
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.execution.transfer import StagedCopies
from kestrel_runtime.imaging import decoding
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD2_SMALL

IMAGE = (MD2_SMALL / "image_1_100x80.png").read_bytes()
NUM_TOKENS = 3
NUM_AT_ONCE = 16
MOST_CALLS_TO_SUBMIT = 71
"""68 with Python 3.11; later versions have no calls for comprehensions."""


def query(number: int = 0) -> Query:
    return Query(f"What is {number}?", IMAGE, sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Iterator[LocalEngine]:
    made = LocalEngine(loaded, EngineConfig(model="", max_batch_size=NUM_AT_ONCE, num_kv_pages=300))
    yield made
    made.close()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls that give the interpreter's lock to another thread or launch something, by name."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return inner(*arguments, **named)

        monkeypatch.setattr(owner, name, counting)

    count(StepRunner, "launch")
    count(StagedCopies, "send")
    count(EngineLoop, "add")
    count(stream_module, "_post")
    return counted


def python_calls(work: Callable[[], object]) -> int:
    """Calls of Python functions of the packages in this thread."""
    found = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and "kestrel" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


async def test_a_known_image_alone_takes_one_step_a_token_and_one_message_a_turn(
    engine: LocalEngine, counts: Counter[str]
) -> None:
    await engine.submit(query()).result()
    counts.clear()
    finished = await engine.submit(query(1)).result()
    assert finished.usage.num_output_tokens == NUM_TOKENS
    assert finished.usage.num_cached_tokens > 0
    assert counts["add"] == 1
    assert counts["launch"] == NUM_TOKENS
    assert counts["_post"] <= NUM_TOKENS
    assert counts["send"] <= 1  # the row of its state; other inputs have no fixed place without graphs


async def test_known_images_at_once_share_steps_and_messages(engine: LocalEngine, counts: Counter[str]) -> None:
    await engine.submit(query()).result()
    counts.clear()
    await asyncio.gather(*(engine.submit(query(number)).result() for number in range(NUM_AT_ONCE)))
    assert counts["add"] == NUM_AT_ONCE
    # Those that come first may begin alone; then prompts and tokens of all are in the same steps.
    assert counts["launch"] <= 4 * NUM_TOKENS
    assert counts["_post"] <= counts["launch"] + 1
    assert counts["send"] <= counts["launch"]


async def test_submitting_a_known_image_takes_no_more_calls_than_it_did(engine: LocalEngine) -> None:
    await engine.submit(query()).result()
    await engine.submit(query(1)).result()  # what is made at first use exists
    streams: list[Stream] = []
    assert python_calls(lambda: streams.append(engine.submit(query(2)))) <= MOST_CALLS_TO_SUBMIT
    await streams[0].result()


async def test_the_header_of_a_new_image_is_read_once(
    engine: LocalEngine, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_header = decoding.read_header

    def counting(*arguments: Any, **named: Any) -> Any:
        counts["read_header"] += 1
        return read_header(*arguments, **named)

    monkeypatch.setattr(decoding, "read_header", counting)
    await engine.submit(replace(query(), image=IMAGE + b"new")).result()
    assert counts["read_header"] == 1
