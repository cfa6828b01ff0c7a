"""Requests whose image is still to come, held in the queue."""

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import EngineUnavailable, ModelNotFound, Overloaded, QueueBound
from kestrel_runtime.api.requests import Caption, RequestOptions
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.runtime.engine.test_engine import endless


async def test_a_request_whose_image_is_still_to_come_counts_as_waiting(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1, max_queued_requests=2))
    try:
        running = engine.submit(endless())
        await anext(running)
        async with engine.expecting(Caption(b"?")), engine.expecting(Caption(b"?"), tenant="another"):
            with pytest.raises(Overloaded) as caught:
                await engine.submit(endless()).result()
            assert (caught.value.bound, caught.value.limit) == (QueueBound.REQUESTS, 2)
            with pytest.raises(Overloaded):
                await engine.expecting(Caption(b"?")).__aenter__()
        assert not engine.submit(endless()).over.done()
    finally:
        engine.close()


async def test_what_cannot_be_submitted_is_not_waited_for(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model=""))
    with pytest.raises(ModelNotFound):
        await engine.expecting(Caption(b"?", options=RequestOptions(model="another"))).__aenter__()
    engine.close()
    with pytest.raises(EngineUnavailable):
        await engine.expecting(Caption(b"?")).__aenter__()
