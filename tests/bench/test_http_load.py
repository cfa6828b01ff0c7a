"""The load over HTTP on a bare server."""

import pytest

from bench.frontend import EVENTS, NUM_DELTAS, POINT_EVENTS
from bench.harness.http_load import bare_http_server, drive, http_loads

EVENTS_OF_PATHS = {"/v1/query": EVENTS, "/v1/chat/completions": EVENTS, "/v1/point": POINT_EVENTS}
LOADS = {load.name: load for load in http_loads()}


@pytest.mark.parametrize("name", ["REST, small requests", "REST, streamed chunks", "OpenAI, streamed chunks"])
async def test_answers_or_the_chunks_of_streams_are_counted(name: str):
    load = LOADS[name]
    async with bare_http_server(EVENTS_OF_PATHS) as port:
        count = await drive(f"127.0.0.1:{port}", load, 0.01)
    assert count >= load.num_in_flight
    # Of OpenAI's chunks one says that an answer begins, and one how it ends.
    per_answer = {"/v1/point": 1, "/v1/query": NUM_DELTAS + 1, "/v1/chat/completions": NUM_DELTAS + 2}[load.path]
    assert count % per_answer == 0
