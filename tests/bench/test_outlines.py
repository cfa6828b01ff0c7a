"""The load of outlines runs, and what it counts is what was answered within its window."""

import argparse

from bench.outlines import load
from tests.server.serving import serving


async def test_a_server_is_loaded_by_as_many_callers_as_asked():
    arguments = argparse.Namespace(scenes=2, seconds=0.1, at_once=3, max_tokens=7)
    async with serving() as rig:
        row = await load(arguments, rig.address)
        assert len(rig.engine.requests) >= 3
    assert row["errors"] == 0
    assert {request.sampling.max_tokens for request in rig.engine.requests} == {7}
