"""Removals of cached content that no call waits for."""

from __future__ import annotations

from kestrel_grpc.wire.cache_purges import CachePurges
from kestrel_runtime.api.engine import ClearedCache
from kestrel_runtime.api.errors import EngineUnavailable
from tests.fakes import FakeEngine

SHA256 = "ab" * 32


async def test_removals_are_done_in_order() -> None:
    engine = FakeEngine()
    purges = CachePurges(engine)
    await purges.done()
    purges.forget_image("a", SHA256)
    purges.clear("b")
    await purges.done()
    purges.forget_image("c", SHA256)
    await purges.done()
    assert engine.cleared == [("a", bytes.fromhex(SHA256)), ("b", None), ("c", bytes.fromhex(SHA256))]


async def test_a_removal_that_fails_keeps_no_other_from_being_done() -> None:
    class Failing(FakeEngine):
        async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
            raise RuntimeError("a bug")

    engine = Failing()
    purges = CachePurges(engine)
    purges.forget_image("a", SHA256)
    purges.clear("b")
    await purges.done()
    assert engine.cleared == [("b", None)]


async def test_an_engine_that_has_ended_has_nothing_to_remove() -> None:
    class Ended(FakeEngine):
        async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
            raise EngineUnavailable("closed")

    engine = Ended()
    purges = CachePurges(engine)
    purges.clear("a")
    purges.forget_image("b", SHA256)
    await purges.done()
    assert engine.cleared == []
