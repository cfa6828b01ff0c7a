"""The requests that an engine runs before those of callers."""

import logging
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Request
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.warm_up import WarmUpFailed, warm_up
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD3_SMALL


class RecordingEngine(LocalEngine):
    """Records the skills of its requests."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        super().__init__(loaded, config)
        self.skills_asked: list[str] = []

    def submit(self, request: Request, **options: Any) -> Stream:
        self.skills_asked.append(request.skill)
        return super().submit(request, **options)


async def test_every_skill_of_the_model_is_asked_for_once_and_nothing_is_left_behind(loaded):
    engine = RecordingEngine(loaded, EngineConfig(model="", max_queued_requests=1))
    await warm_up(engine)
    assert sorted(engine.skills_asked) == sorted(engine.info.skills)
    engine.close()
    assert engine.load().num_used_pages == 0


@pytest.mark.parametrize("bound", [{"max_image_bytes": 10}, {"max_image_pixels": 10}])
async def test_requests_that_the_limits_refuse_are_skipped(loaded, bound, caplog):
    engine = LocalEngine(loaded, EngineConfig(model=str(MD3_SMALL), **bound))
    with caplog.at_level(logging.WARNING):
        await warm_up(engine)
    assert "a caption of a small image does not fit" in caplog.text
    engine.close()


async def test_an_engine_that_fails_its_own_requests_is_not_warm(loaded):
    engine = LocalEngine(loaded, EngineConfig(model=str(MD3_SMALL)))
    engine.close()
    with pytest.raises(WarmUpFailed, match="a query"):
        await warm_up(engine)
