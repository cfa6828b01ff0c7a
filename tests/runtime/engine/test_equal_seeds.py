"""Equal seeds give equal answers in float32: in any batch, after a preemption, and in another process."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.events import QueryOutput
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.scheduling.scheduler import Scheduler
from tests.reference_fixtures import CHECKOUT, MD3_SMALL, image_paths

QUESTIONS = ("Why?", "Where does the kite hide?", "zq 7 xv", "Sing, then sum up", "What rhymes in this image?")
NO_END = ((0, -100.0),)
"""So that answers are long."""
MAX_WAIT_S = 120


def drawn(number: int) -> Query:
    """One of many requests whose answers depend on the seed."""
    question = QUESTIONS[number % len(QUESTIONS)]
    image = image_paths(MD3_SMALL)[0].read_bytes() if "image" in question else None
    sampling = SamplingParams(temperature=2.0, max_tokens=33, seed=number // 2, logit_bias=NO_END)
    return Query(question, image, sampling=sampling)


async def answers(requests: Sequence[Query], *, together: bool, **settings: Any) -> list[str]:
    """The answers of a new engine, asked one after the other or all at once."""
    engine = LocalEngine.start(EngineConfig(dtype="float32", device="cpu", **settings))
    try:
        found: list[str] = []
        streams = [engine.submit(request) for request in requests] if together else []
        for place, request in enumerate(requests):
            stream = streams[place] if together else engine.submit(request)
            output = (await stream.result()).output
            assert isinstance(output, QueryOutput)
            found.append(output.answer)
        return found
    finally:
        engine.close()


def print_answers() -> None:
    """What another process runs: the answers in an order of its own."""
    numbers = [7, 3, 9, 0, 4]
    found = asyncio.run(answers([drawn(number) for number in numbers], together=True))
    print(json.dumps(dict(zip(numbers, found, strict=True))))


@pytest.mark.usefixtures("warm_starts")
async def test_a_batch_a_preemption_and_a_restart_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "from tests.runtime.engine import test_equal_seeds as t; t.print_answers()"]
    process = await asyncio.create_subprocess_exec(*command, cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE)

    requests = [drawn(number) for number in range(10)]
    alone = await answers(requests, together=False)
    assert len(set(alone)) == len(alone), "else the test shows nothing: each pair of question and seed is another"
    assert await answers(requests[::-1], together=True) == alone[::-1]

    num_preemptions = 0
    preempt = Scheduler._preempt

    def counted(scheduler: Scheduler, sequence: Any) -> None:
        nonlocal num_preemptions
        num_preemptions += 1
        preempt(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    assert await answers(requests, together=True, num_kv_pages=20) == alone
    assert num_preemptions > 0

    async with asyncio.timeout(MAX_WAIT_S):
        printed, _ = await process.communicate()
    assert process.returncode == 0
    elsewhere = json.loads(printed.splitlines()[-1])
    assert elsewhere == {str(number): alone[number] for number in (7, 3, 9, 0, 4)}
