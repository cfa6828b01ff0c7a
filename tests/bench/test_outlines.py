"""The load of outlines runs, and what it counts is what was answered within its window."""

from __future__ import annotations

import argparse

from bench.outlines import Outlined, load, objects, summary
from tests.server.serving import serving


def test_there_is_one_object_for_each_picture() -> None:
    first, second = objects(2)
    assert first.picture != second.picture
    assert first.name


def test_a_row_has_rates_and_shares() -> None:
    answers = [Outlined(1.0, 0.25, 1.0, 30, False, 0.5), Outlined(2.0, None, 3.0, 10, True, 0.0)]
    row = summary(answers, 4.0)
    assert (row["outlines"], row["outlines per s"], row["tokens per s"], row["mean IoU"]) == (2, 0.5, 10.0, 0.25)
    assert (row["time to box, median"], row["time to outline, median"]) == (0.25, 2.0)
    assert (row["found"], row["partial"]) == (0.5, 0.5)


async def test_a_server_is_loaded_by_as_many_callers_as_asked() -> None:
    arguments = argparse.Namespace(scenes=2, seconds=0.1, at_once=3, max_tokens=7)
    async with serving() as rig:
        row = await load(arguments, rig.address)
        assert len(rig.engine.requests) >= 3
    assert row["errors"] == 0
    assert {request.sampling.max_tokens for request in rig.engine.requests} == {7}
