"""Three hundred streams of the built-in model: what comes in pieces is what comes at the end."""

import asyncio

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.events import Finished, QueryOutput, TextDelta
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine


async def answer(engine: LocalEngine, seed: int) -> tuple[str, str]:
    """The joined pieces and the final text of one drawn answer."""
    # Hot enough that bytes come in any order: whole characters, halves, and some that belong to none.
    sampling = SamplingParams(temperature=(0.5, 1.5, 3.0, 8.0)[seed % 4], top_p=1.0, max_tokens=16, seed=seed)
    pieces = ""
    async for event in engine.submit(Query("What is this?", sampling=sampling)):
        if isinstance(event, TextDelta):
            pieces += event.text
        if isinstance(event, Finished):
            assert isinstance(event.output, QueryOutput)
            return pieces, event.output.answer
    raise AssertionError("a stream ends with Finished")


async def test_the_pieces_of_three_hundred_answers_add_up_to_the_answers():
    engine = LocalEngine.start(EngineConfig(max_batch_size=64, max_queued_requests=300))
    try:
        answers = await asyncio.gather(*(answer(engine, seed) for seed in range(300)))
    finally:
        engine.close()
    assert [pieces for pieces, _ in answers] == [whole for _, whole in answers]
    whole = "".join(text for _, text in answers)
    assert any(ord(character) > 127 and character != "\ufffd" for character in whole)
    assert "\ufffd" in whole
    assert len({text for _, text in answers}) > 150
