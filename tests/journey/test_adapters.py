"""Adapters over the wire: named per request, by the option or with the model, and managed by operators."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_client import (
    AdapterExists,
    AdapterInvalid,
    AdapterNotFound,
    AsyncClient,
    InvalidRequest,
    ModelNotFound,
    ServerError,
)
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.multiprocess.engine_channel.core_server import CoreServer
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.engine_client import EngineClient
from kestrel_grpc.server import Server
from kestrel_runtime.adapters.files import AdapterSource
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.events import QueryOutput
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.config import TextConfig
from tests.adapter_folders import merged, random_pairs, scaled, write_peft
from tests.fakes import FakeEngine
from tests.reference_fixtures import CHECKOUT
from tests.server.http_calls import HttpServing

QUESTION = "What colour is it?"
PICTURE = (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5}


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return LoadedModel.load(EngineConfig(dtype="float32", device="cpu"))


async def merged_answer(loaded: LoadedModel) -> str:
    engine = LocalEngine(loaded, EngineConfig(num_kv_pages=300))
    try:
        finished = await engine.submit(Query(QUESTION, sampling=SamplingParams(**GREEDY))).result()
    finally:
        engine.close()
    assert isinstance(finished.output, QueryOutput)
    return finished.output.answer


@asynccontextmanager
async def served(nano: LoadedModel, root: Path, **settings: Any) -> AsyncIterator[tuple[AsyncClient, Server]]:
    engine = LocalEngine(nano, EngineConfig(num_kv_pages=300, adapters=str(root), max_adapter_rank=4, **settings))
    config = ServerConfig(port=0, http_port=0, withdrawal_delay=0.0)
    try:
        async with Server(engine, config) as server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            yield client, server
    finally:
        engine.close()


async def post(server: Server, path: str, body: Any) -> Any:
    response = await HttpServing(server, FakeEngine()).ask(path, body)
    assert response.status == 200, response.body
    return json.loads(response.body)


async def test_an_adapter_is_named_per_request(nano: LoadedModel, tmp_path: Path):
    first, second = (random_pairs(nano.model.config.text, seed=seed) for seed in (1, 2))
    write_peft(tmp_path / "team" / "colours" / "checkpoint-7", first)
    write_peft(tmp_path / "second", second)
    expected = [await merged_answer(merged(nano, scaled(pairs))) for pairs in (first, second)]
    plain = await merged_answer(nano)
    assert len({*expected, plain}) == 3, "else the test shows nothing"
    model = nano.checkpoint.name
    async with served(nano, tmp_path) as (client, server):
        found = await asyncio.gather(
            client.complete_query(None, QUESTION, adapter="team/colours@7", **GREEDY),
            client.complete_query(None, QUESTION, adapter="second", **GREEDY),
            client.complete_query(None, QUESTION, **GREEDY),
            client.complete_query(None, QUESTION, model=f"{model}/second", **GREEDY),
        )
        assert [result.answer for result in found] == [*expected, plain, expected[1]]
        assert {adapter.name for adapter in await client.list_adapters()} == {"team/colours@7", "second"}
        body = {"model": f"{model}/team/colours@7", "messages": [{"role": "user", "content": QUESTION}], **GREEDY}
        answer = await post(server, "/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == expected[0]
        body = {"model": f"{model}/second", "question": QUESTION, "settings": GREEDY}
        assert (await post(server, "/v1/query", body))["answer"] == expected[1]
        assert (await client.complete_query(None, QUESTION, model="second", **GREEDY)).answer == expected[1]
        with pytest.raises(ModelNotFound, match=r"no model named 'secnd' is served; did you mean second\?"):
            await client.complete_query(None, QUESTION, model="secnd")
        with pytest.raises(AdapterNotFound, match=r"no adapter named 'secnd'; did you mean second\?"):
            await client.complete_query(None, QUESTION, adapter="secnd")
        with pytest.raises(ModelNotFound):
            await client.complete_query(None, QUESTION, model="another/second")
        with pytest.raises(ModelNotFound):
            await client.complete_query(None, QUESTION, model="second", adapter="team/colours@7")


async def test_adapters_that_may_be_named_are_listed_with_the_model(nano: LoadedModel, tmp_path: Path):
    write_peft(tmp_path / "team" / "colours" / "checkpoint-7", random_pairs(nano.model.config.text, seed=1))
    model = nano.checkpoint.name
    async with served(nano, tmp_path) as (client, server):
        assert await client.adapter_names() == ("team/colours@7",)
        assert await client.list_adapters() == ()
        http = HttpServing(server, FakeEngine())
        listed = json.loads((await http.ask("/v1/models")).body)["data"]
        assert [(item["id"], item.get("parent")) for item in listed] == [(model, None), ("team/colours@7", model)]
        one = json.loads((await http.ask("/v1/models/team/colours@7")).body)
        assert one == listed[1]
        wrong = await http.ask("/v1/models/team/colour@7")
        assert (wrong.status, b"did you mean team/colours@7?" in wrong.body) == (404, True)
        body = {"model": "team/colours@7", "messages": [{"role": "user", "content": QUESTION}], **GREEDY}
        chosen = (await post(server, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
        assert chosen == (await client.complete_query(None, QUESTION, adapter="team/colours@7", **GREEDY)).answer


async def test_models_are_listed_although_the_folder_of_adapters_does_not_answer(
    nano: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_peft(tmp_path / "second", random_pairs(nano.model.config.text, seed=2))
    may_go_on = threading.Event()

    def hangs(self: AdapterSource) -> list[str]:
        may_go_on.wait()
        return []

    monkeypatch.setattr(AdapterSource, "names", hangs)
    monkeypatch.setattr("kestrel_runtime.engine.engine._ADAPTER_NAMES_S", 0.01)
    try:
        async with served(nano, tmp_path) as (client, server):
            await client.load_adapter("second")
            listed = json.loads((await HttpServing(server, FakeEngine()).ask("/v1/models")).body)["data"]
            assert [item["id"] for item in listed] == [nano.checkpoint.name, "second"]
    finally:
        may_go_on.set()


async def test_a_server_without_adapters_says_which_option_it_lacks(nano: LoadedModel):
    engine = LocalEngine(nano, EngineConfig(num_kv_pages=300))
    config = ServerConfig(port=0, withdrawal_delay=0.0)
    async with Server(engine, config) as server, AsyncClient(f"127.0.0.1:{server.port}") as client:
        for refused in (client.complete_query(None, QUESTION, adapter="gold"), client.load_adapter("gold")):
            with pytest.raises(AdapterNotFound, match="the server was started without --adapters"):
                await refused
        assert await client.adapter_names() == ()


def write_overflowing(root: Path, config: TextConfig) -> None:
    """Adapters whose numbers are finite and whose products are not: `all`, and `last`, in the last block alone."""
    for name, block in (("all", "blocks."), ("last", f"blocks.{config.n_layers - 1}.")):
        pairs = random_pairs(config, seed=1, targets=lambda target, block=block: target.startswith(block))
        large = {target: (torch.full_like(a, 1e20), torch.ones_like(b)) for target, (a, b) in pairs.items()}
        write_peft(root / name, large)


@pytest.mark.parametrize("adapter", ["all", "last"])
async def test_an_adapter_whose_numbers_overflow_ends_its_own_requests_with_a_reason(
    nano: LoadedModel, tmp_path: Path, adapter: str
):
    write_overflowing(tmp_path, nano.model.config.text)
    write_peft(tmp_path / "sound", random_pairs(nano.model.config.text, seed=2))
    async with served(nano, tmp_path) as (client, server):

        async def others() -> list[str]:
            found = [client.complete_query(None, QUESTION, adapter=name, **GREEDY) for name in (None, "sound")]
            found.append(client.complete_query(PICTURE, "What color is the star?", **GREEDY))
            return [result.answer for result in await asyncio.gather(*found)]

        async def refused(call: Awaitable[Any]) -> None:
            with pytest.raises(ServerError, match=f"with the adapter '{adapter}' became too large") as caught:
                await call
            assert caught.value.reason == "NUMBERS_OVERFLOWED"

        before = await others()
        overflowing = [
            client.complete_query(None, QUESTION, adapter=adapter, **GREEDY),
            client.complete_query(PICTURE, QUESTION, adapter=adapter, logprobs=3, **GREEDY),
            client.complete_query(None, QUESTION, adapter=adapter, choices=["red", "blue"]),
            client.complete_query(None, QUESTION, adapter=adapter, temperature=1.0, top_p=0.5, max_tokens=3),
            client.detect(PICTURE, "star", adapter=adapter),
            client.point(PICTURE, "star", adapter=adapter),
            client.complete_caption(PICTURE, adapter=adapter),
        ]
        during, *_ = await asyncio.gather(others(), *map(refused, overflowing))
        await refused(client.complete_query(None, QUESTION, adapter=adapter, **GREEDY))  # of cached pages
        assert before == during == await others()
        http = HttpServing(server, FakeEngine())
        chat = {"model": adapter, "messages": [{"role": "user", "content": QUESTION}], "logprobs": True}
        for path, body in (
            ("/v1/query", {"question": QUESTION, "model": adapter}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "stream": True}),
        ):
            answer = await http.ask(path, body)
            assert answer.status == 422
            assert b"numbers_overflowed" in answer.body.lower()
            assert b"NaN" not in answer.body


async def test_what_cannot_be_used_is_refused_and_the_server_goes_on(nano: LoadedModel, tmp_path: Path):
    pairs = random_pairs(nano.model.config.text, seed=1, rank=5)
    write_peft(tmp_path / "large", pairs)
    async with served(nano, tmp_path) as (client, _):
        with pytest.raises(AdapterInvalid, match="rank 5 is not from 1 to 4"):
            await client.complete_query(None, QUESTION, adapter="large")
        with pytest.raises(AdapterNotFound):
            await client.complete_query(None, QUESTION, adapter="absent")
        with pytest.raises(InvalidRequest):
            await client.complete_query(None, QUESTION, adapter="../large")
        assert (await client.complete_query(None, QUESTION, max_tokens=1)).answer is not None
        assert await client.list_adapters() == ()


async def test_a_new_version_is_loaded_under_the_same_name(nano: LoadedModel, tmp_path: Path):
    answers: list[str] = []
    async with served(nano, tmp_path, num_adapter_slots=1) as (client, _):
        for seed in (1, 2):
            shutil.rmtree(tmp_path / "colours", ignore_errors=True)
            write_peft(tmp_path / "colours", random_pairs(nano.model.config.text, seed=seed))
            loaded = await client.load_adapter("colours")
            assert loaded.is_current
            answers.append((await client.complete_query(None, QUESTION, adapter="colours", **GREEDY)).answer)
        await client.unload_adapter("colours")
        assert await client.list_adapters() == ()
        with pytest.raises(AdapterNotFound, match="it is not loaded"):
            await client.unload_adapter("colours")
        again = await client.complete_query(None, QUESTION, adapter="colours", **GREEDY)
    assert answers[0] != answers[1] == again.answer


async def test_an_uploaded_adapter_answers_and_a_running_request_keeps_the_version_that_it_replaces(
    nano: LoadedModel, tmp_path: Path
):
    pairs = [random_pairs(nano.model.config.text, seed=seed) for seed in (1, 2)]
    sources = [write_peft(tmp_path / "sources" / str(number), one) for number, one in enumerate(pairs)]
    root = tmp_path / "adapters"
    root.mkdir()
    long: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60}
    async with served(nano, root) as (client, _):
        uploaded = await client.upload_adapter("team/a", sources[0])
        assert await client.adapter_names() == ("team/a",)
        whole = (await client.complete_query(None, QUESTION, adapter="team/a", **long)).answer
        running = client.query(None, QUESTION, adapter="team/a", **long)
        first = await anext(aiter(running))
        with pytest.raises(AdapterExists):
            await client.upload_adapter("team/a", sources[1])
        replaced = await client.upload_adapter("team/a", sources[1], replace=True)
        assert (uploaded.replaced, replaced.replaced) == (False, True)
        assert (await client.complete_query(None, QUESTION, adapter="team/a", **GREEDY)).answer == (
            await merged_answer(merged(nano, scaled(pairs[1])))
        )
        assert first + "".join([piece async for piece in running]) == whole
        (loaded,) = [adapter for adapter in await client.list_adapters() if adapter.is_current]
        assert loaded.digest == replaced.digest != uploaded.digest


async def test_a_removed_adapter_cannot_be_named_by_any_of_its_names_and_a_running_request_finishes(
    nano: LoadedModel, tmp_path: Path
):
    write_peft(tmp_path / "a" / "checkpoint-7", random_pairs(nano.model.config.text, seed=1))
    # An answer that does not end by itself.
    long: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200, "logit_bias": {0: -100.0}}
    async with served(nano, tmp_path) as (client, _):
        whole = (await client.complete_query(None, QUESTION, adapter="a@7", **long)).answer
        await client.complete_query(None, QUESTION, adapter="a/checkpoint-7", **GREEDY)
        running = client.query(None, QUESTION, adapter="a@7", **long)
        first = await anext(aiter(running))
        assert await client.delete_adapter("a@7") == 1
        for name in ("a@7", "a/checkpoint-7"):
            with pytest.raises(AdapterNotFound):
                await client.complete_query(None, QUESTION, adapter=name, **GREEDY)
        assert await client.adapter_names() == ()
        assert first + "".join([piece async for piece in running]) == whole
        assert await client.list_adapters() == ()
        assert os.listdir(tmp_path) == []


async def test_an_upload_that_the_model_cannot_use_is_refused_with_every_problem(nano: LoadedModel, tmp_path: Path):
    source = write_peft(tmp_path / "large", random_pairs(nano.model.config.text, seed=1, rank=5))
    root = tmp_path / "adapters"
    write_peft(root / "a", random_pairs(nano.model.config.text, seed=2))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    async with served(nano, root) as (client, _):
        for name, replace in (("large", False), ("a", True)):
            with pytest.raises(AdapterInvalid, match="rank 5 is not from 1 to 4"):
                await client.upload_adapter(name, source, replace=replace)
        (source / "adapter_config.json").write_bytes(b"{")
        with pytest.raises(AdapterInvalid, match="is not JSON"):
            await client.upload_adapter("large", source)
        weights = source / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        with pytest.raises(AdapterInvalid):
            await client.upload_adapter("large", weights)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert [path.name for path in root.iterdir()] == ["a"]


async def test_what_one_front_end_uploads_and_removes_is_known_to_the_others_at_once(
    nano: LoadedModel, tmp_path: Path
):
    """The front ends share two engines, as with several devices."""
    pairs = [random_pairs(nano.model.config.text, seed=seed) for seed in (1, 2)]
    sources = [write_peft(tmp_path / "sources" / str(number), one) for number, one in enumerate(pairs)]
    expected = [await merged_answer(merged(nano, scaled(one))) for one in pairs]
    root = tmp_path / "adapters"
    root.mkdir()
    settings = EngineConfig(num_kv_pages=300, adapters=str(root), max_adapter_rank=4)
    config = ServerConfig(port=0, withdrawal_delay=0.0)
    async with AsyncExitStack() as stack:
        endpoints = [CoreEndpoint(tmp_path, index) for index in range(2)]
        for endpoint in endpoints:
            engine = LocalEngine(nano, settings)
            stack.push_async_callback(asyncio.to_thread, engine.close)
            core = CoreServer(engine, endpoint)
            await core.start()
            stack.push_async_callback(core.close)
        clients: list[AsyncClient] = []
        for number in range(2):
            asked = await EngineClient.connect(endpoints, f"frontend-{number}.1")
            server = await stack.enter_async_context(Server(asked, config))
            clients.append(await stack.enter_async_context(AsyncClient(f"127.0.0.1:{server.port}")))
        for source, answer in zip(sources, expected, strict=True):
            await clients[0].upload_adapter("a", source, replace=True)
            assert await clients[1].adapter_names() == ("a",)
            for _ in range(3):  # in turn of the two engines
                found = await asyncio.gather(
                    *(client.complete_query(None, QUESTION, adapter="a", **GREEDY) for client in clients * 2)
                )
                assert {result.answer for result in found} == {answer}
        await clients[1].delete_adapter("a")
        assert await clients[0].adapter_names() == ()
        for client in clients * 2:  # in turn of the two engines
            with pytest.raises(AdapterNotFound):
                await client.complete_query(None, QUESTION, adapter="a", **GREEDY)
