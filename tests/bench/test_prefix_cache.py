"""The comparison of known and new images runs, and counts each image as new once."""

from __future__ import annotations

from bench.prefix_cache import measure, pictures
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine


def test_pictures_differ():
    assert len(set(pictures(4))) == 4


async def test_each_image_is_new_once_and_known_once():
    engine = LocalEngine.start(EngineConfig(device="cpu", dtype="float32"))
    try:
        misses, hits = await measure(engine, 2)
    finally:
        engine.close()
    assert len(misses) == len(hits) == 2
