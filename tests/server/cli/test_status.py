"""info, models and load, asked of a server on a fake engine."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import AsyncMock

import pytest

from kestrel_grpc import __version__
from kestrel_grpc.__main__ import main
from kestrel_runtime.api.adapters import AdapterInfo
from tests.fakes import FakeEngine
from tests.server.serving import serving


async def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    async with serving() as rig:
        capsys.readouterr()  # the server's own line
        assert await asyncio.to_thread(main, [*words, "--address", rig.address]) == 0
    return capsys.readouterr().out


async def test_info_says_which_server_this_is_and_what_it_accepts(capsys):
    rows = dict(line.split(maxsplit=1) for line in (await printed(capsys, "info")).splitlines())
    assert rows["server_version"] == __version__
    assert rows["model"] == "fake"
    assert rows["capabilities"] == "images"
    assert rows["limits.max_image_bytes"] == "33,554,432"


async def test_models_lists_skills_and_their_defaults(capsys):
    (model,) = json.loads(await printed(capsys, "models", "--json"))
    assert model["name"] == "fake"
    assert "query" in model["skills"]


async def test_load_is_a_table_of_numbers(capsys):
    rows = dict(line.split(maxsplit=1) for line in (await printed(capsys, "load")).splitlines())
    assert rows["running_request_count"] == "0"


async def test_adapters_are_listed_loaded_and_unloaded(capsys):
    lines = (await printed(capsys, "adapter", "list")).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "colours abababababab 2 requests",
        "shapes@200 not loaded",
    ]
    listed = json.loads(await printed(capsys, "adapter", "list", "--json"))
    assert [(item["name"], item["is_loaded"]) for item in listed] == [("colours", True), ("shapes@200", False)]
    for action in ("load", "unload"):
        (adapter,) = json.loads(await printed(capsys, "adapter", action, "colours", "--json"))
        assert (adapter["name"], adapter["request_count"]) == ("colours", 2)


@pytest.mark.parametrize(
    ("num_requests", "said"),
    [
        (0, "has left its slot"),
        (1, "leaves its slot when no request uses it; now 1 request\n"),
        (2, "now 2 requests\n"),
    ],
)
async def test_an_adapter_that_is_unloaded_is_said_to_leave_when_its_requests_end(
    capsys, monkeypatch, num_requests, said
):
    info = AdapterInfo("colours", "ab" * 32, slot=1, num_requests=num_requests, is_current=False)
    monkeypatch.setattr(FakeEngine, "unload_adapter", AsyncMock(return_value=info))
    assert said in await printed(capsys, "adapter", "unload", "colours")
