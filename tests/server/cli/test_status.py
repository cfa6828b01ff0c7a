"""info, models and load, asked of a server on a fake engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from kestrel_grpc import __version__
from kestrel_grpc.__main__ import main
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
    assert rows["limits.max_image_bytes"] == "33,554,432"


async def test_models_lists_skills_and_their_defaults(capsys):
    (model,) = json.loads(await printed(capsys, "models", "--json"))
    assert model["name"] == "fake"
    assert "query" in model["skills"]


async def test_load_is_a_table_of_numbers(capsys):
    rows = dict(line.split(maxsplit=1) for line in (await printed(capsys, "load")).splitlines())
    assert rows["running_request_count"] == "0"


async def test_adapters_are_listed_loaded_and_unloaded(capsys):
    line = await printed(capsys, "adapter", "list")
    assert line.split() == ["colours", "abababababab", "2", "requests"]
    for action in ("load", "unload"):
        (adapter,) = json.loads(await printed(capsys, "adapter", action, "colours", "--json"))
        assert (adapter["name"], adapter["request_count"]) == ("colours", 2)
