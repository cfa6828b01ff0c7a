"""info, models and load, asked of a server on a fake engine."""

import asyncio
import dataclasses
import json
import os
from unittest.mock import AsyncMock

import pytest

from kestrel_grpc import __version__
from kestrel_grpc.__main__ import main
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_runtime.api.adapters import AdapterInfo
from kestrel_runtime.api.engine import CoreReading, EngineStatus, MemoryPlan
from tests.fakes import FakeEngine
from tests.server.serving import serving


async def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    async with serving() as rig:
        capsys.readouterr()  # the server's own line
        assert await asyncio.to_thread(main, [*words, "--address", rig.address]) == 0
    return capsys.readouterr().out


def facts(text: str) -> dict[str, str]:
    """The names and values above the tables."""
    return dict(line.split(maxsplit=1) for line in text.partition("\n\n")[0].splitlines())


def tables(text: str) -> list[list[str]]:
    """The lines of each table, with one space in place of several."""
    return [[" ".join(line.split()) for line in part.splitlines()] for part in text.split("\n\n")[1:]]


async def test_info_says_which_server_this_is_and_what_it_accepts(capsys):
    rows = facts(await printed(capsys, "info"))
    assert rows["server_version"] == __version__
    assert rows["model"] == "fake"
    assert "images" in rows["capabilities"].split(", ")
    assert rows["limits.max_image_bytes"] == "33,554,432"


async def test_models_lists_skills_and_their_defaults(capsys):
    (model,) = json.loads(await printed(capsys, "models", "--json"))
    assert model["name"] == "fake"
    assert "query" in model["skills"]


async def test_load_is_a_table_of_numbers(capsys):
    text = await printed(capsys, "load")
    assert facts(text)["running_request_count"] == "0"
    assert tables(text) == [
        [
            "engine device process status running waiting preparing pages tokens/s",
            f"0 cpu {os.getpid()} serving 0 2 3 40 of 500 123.5",
        ],
        ["front end process requests", f"(whole server) {os.getpid()} 0"],
    ]


@pytest.fixture
def three_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has three engines; the processes of two are started again, the last one for the first time."""
    plan = MemoryPlan(2**37, 0.9, 3 * 2**30, 2**36, *[0] * 6)

    def cores(engine: FakeEngine) -> list[CoreReading]:
        info = dataclasses.replace(engine.info, device="cuda", device_uuid="1a2b", device_name="A GPU", memory=plan)
        return [
            CoreReading(0, EngineStatus.SERVING, info, engine.load(), 4711),
            CoreReading(1, EngineStatus.RECOVERING, info, None, None),
            CoreReading(2, EngineStatus.RECOVERING, None, None, None),
        ]

    monkeypatch.setattr(FakeEngine, "cores", cores)


@pytest.mark.usefixtures("three_engines")
async def test_load_and_info_have_a_line_for_each_engine(capsys):
    load, _ = tables(await printed(capsys, "load"))
    assert load[1:] == [
        "0 cuda 4711 serving 0 2 3 40 of 500 123.5",
        "1 cuda - recovering - - - - -",
        "2 - - recovering - - - - -",
    ]
    (info,) = tables(await printed(capsys, "info"))
    assert info == [
        "engine device name batch weights KV cache memory GPU",
        "0 cuda A GPU 16 3.00 GiB 64.00 GiB 128.00 GiB 1a2b",
        "1 cuda A GPU 16 3.00 GiB 64.00 GiB 128.00 GiB 1a2b",
        "2 - - - - - - -",
    ]


@pytest.mark.usefixtures("three_engines")
async def test_engines_and_processes_are_in_the_json_too(capsys):
    load = json.loads(await printed(capsys, "load", "--json"))
    assert load["page_count"] == load["engines"][0]["load"]["page_count"] == 500
    assert [engine["status"] for engine in load["engines"]] == ["serving", "recovering", "recovering"]
    assert load["engines"][1]["load"] is None
    assert load["frontends"] == [{"name": "", "process_id": os.getpid(), "open_request_count": 0}]
    info = json.loads(await printed(capsys, "info", "--json"))
    assert info["engines"][0]["memory_plan"]["total_bytes"] == 2**37
    assert info["frontend_count"] == 0


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


async def test_an_adapter_is_uploaded_and_replaced_on_request_alone(capsys, tmp_path):
    root = tmp_path / "adapters"
    root.mkdir()
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    engine = FakeEngine()
    engine.info = dataclasses.replace(
        engine.info, config=dataclasses.replace(engine.info.config, adapters=str(root))
    )
    async with serving(engine) as rig:

        async def upload(*more: str) -> tuple[int, str, str]:
            words = [
                "adapter",
                "upload",
                "team/a",
                str(tmp_path / "a.safetensors"),
                "--address",
                rig.address,
                *more,
            ]
            capsys.readouterr()
            status = await asyncio.to_thread(main, words)
            printed = capsys.readouterr()
            return status, printed.out, printed.err

        status, out, _ = await upload()
        assert (status, "has been added" in out) == (0, True)
        status, out, error = await upload()
        assert (status, out) == (1, "")
        assert "'team/a' exists already" in error
        assert "--replace" in error
        status, out, _ = await upload("--replace", "--json")
        assert status == 0
        found = json.loads(out)
    assert (found["name"], found["replaced"], len(found["digest"])) == ("team/a", True, 64)
    assert (root / "team" / "a" / "adapter_model.safetensors").read_bytes() == b"weights"


async def test_an_adapter_is_removed_and_requests_that_still_use_it_are_counted(capsys, tmp_path):
    engine = FakeEngine()
    engine.info = dataclasses.replace(
        engine.info, config=dataclasses.replace(engine.info.config, adapters=str(tmp_path))
    )
    async with serving(engine) as rig:

        async def remove(name: str, *more: str) -> tuple[int, str, str]:
            capsys.readouterr()
            words = ["adapter", "remove", name, "--address", rig.address, *more]
            status = await asyncio.to_thread(main, words)
            printed = capsys.readouterr()
            return status, " ".join(printed.out.split()), printed.err

        def put(name: str) -> None:
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.safetensors").write_bytes(b"weights")

        for name in ("colours", "team"):
            put(name)
        assert await remove("colours") == (0, "colours has been removed; 2 requests use it until the end", "")
        assert await remove("team") == (0, "team has been removed", "")
        status, out, error = await remove("team")
        assert (status, out, "no adapter named 'team'" in error) == (1, "", True)
        put("colours")
        status, out, _ = await remove("colours", "--json")
        assert (status, json.loads(out)) == (0, {"name": "colours", "request_count": 2})


@pytest.mark.parametrize(
    ("has_tokens", "words", "said"),
    [
        (
            True,
            ("--caller", "alise"),
            "--caller 'alise' is not in the file of tokens, which has alice; did you mean alice?",
        ),
        (True, ("--namespace", "x"), "--namespace 'x' is not in the file of tokens, which has none"),
        (False, ("--caller", "x"), "--caller 'x' cannot be found: the server was started without --tokens"),
    ],
)
async def test_an_unknown_owner_of_cached_content_is_named_with_the_known_ones(
    capsys, tmp_path, has_tokens, words, said
):
    path = tmp_path / "tokens.toml"
    path.write_text(line_for("alice", "kestrel_alice", frozenset({Scope.ADMIN})))
    async with serving(tokens=str(path) if has_tokens else None) as rig:
        capsys.readouterr()
        command = ["clear-cache", *words, "--address", rig.address, "--token", "kestrel_alice"]
        assert await asyncio.to_thread(main, command) == 1
    assert said in capsys.readouterr().err


async def test_a_server_without_adapters_says_how_it_gets_one(capsys, monkeypatch):
    monkeypatch.setattr(FakeEngine, "adapters", lambda _: [])
    monkeypatch.setattr(FakeEngine, "adapter_names", AsyncMock(return_value=[]))
    async with serving() as rig:
        assert await asyncio.to_thread(main, ["adapter", "list", "--address", rig.address]) == 0
    assert "kestrel-grpc adapter upload NAME PATH" in capsys.readouterr().err
