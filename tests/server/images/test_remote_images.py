import asyncio
import base64
import socket
import ssl
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.image_uris import ImageFetchFailed, ImageUriNotAllowed, parse_hosts
from kestrel_grpc.images.remote_images import MAX_CONCURRENT_FETCHES, RemoteImages
from kestrel_grpc.server import Server
from kestrel_runtime.api.errors import ImageError
from tests.fakes import FakeEngine
from tests.server.serving import Serving, details_of, open_channel, reason_of, serving

IMAGE = b"the bytes of an image"
MAX_BYTES = 1000


class Host:
    """A web server on this machine that answers as it is told: `answers` maps paths to bytes, or to functions."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Callable[[StreamReader, StreamWriter], Awaitable[object]]] = {}
        self.requests: list[str] = []
        self.port = 0
        self.num_open = 0
        self.max_open = 0

    async def handle(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            answer = self.answers[head.split(" ")[1]]
            if callable(answer):
                await answer(reader, writer)
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


def ok(content: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(content)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def hosting(authority: trustme.CA | None = None) -> AsyncIterator[Host]:
    context = None
    if authority is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(context)
    host = Host()
    server = await asyncio.start_server(host.handle, "127.0.0.1", 0, ssl=context)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


@asynccontextmanager
async def images_from(
    hosts: str,
    *,
    timeout_s: float = 20.0,
    allows_address: Callable[[str], bool] | None = lambda address: True,
    authority: trustme.CA | None = None,
) -> AsyncIterator[RemoteImages]:
    context = None
    if authority is not None:
        context = ssl.create_default_context()
        authority.configure_trust(context)
    rule = {} if allows_address is None else {"allows_address": allows_address}
    images = RemoteImages(parse_hosts(hosts), max_bytes=MAX_BYTES, timeout_s=timeout_s, ssl_context=context, **rule)
    try:
        yield images
    finally:
        await images.close()


async def test_an_image_is_fetched_over_an_encrypted_connection(authority):
    async with hosting(authority) as host, images_from(f"localhost:{host.port}", authority=authority) as images:
        host.answers["/a.png?size=2"] = ok(IMAGE)
        assert await images.fetch(f"https://localhost:{host.port}/a.png?size=2") == IMAGE
    assert "accept-encoding: identity" in host.requests[0].lower()


async def test_a_host_that_cannot_prove_its_name_is_not_asked(authority):
    async with hosting(authority) as host, images_from(f"localhost:{host.port}") as images:
        with pytest.raises(ImageFetchFailed, match="could not be reached"):
            await images.fetch(f"https://localhost:{host.port}/a.png")
    assert host.requests == []


@asynccontextmanager
async def plain(**settings) -> AsyncIterator[tuple[Host, RemoteImages, str]]:
    """An unencrypted host that is allowed, and the head of its addresses."""
    async with hosting() as host:
        uri = f"http://localhost:{host.port}"
        async with images_from(uri, **settings) as images:
            yield host, images, uri


async def test_a_host_inside_the_network_is_not_asked_even_where_it_is_listed():
    async with plain(allows_address=None) as (host, images, uri):
        with pytest.raises(ImageUriNotAllowed, match="address is not public"):
            await images.fetch(f"{uri}/a.png")
    assert host.requests == []


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch):
    # A name that stands for a public address at first, and for this machine whenever it is asked again.
    async with plain(allows_address=lambda address: address == "203.0.113.1", timeout_s=0.2) as (host, images, uri):
        lookups: list[str] = []

        def look_up(name, port, **_):
            lookups.append(name)
            address = "203.0.113.1" if len(lookups) == 1 else "127.0.0.1"
            return [(2, 1, 6, "", (address, port))]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        with pytest.raises(ImageFetchFailed):
            await images.fetch(f"{uri}/a.png")
    assert lookups[0] == "localhost"
    assert host.requests == []


async def test_allowed_addresses_are_tried_one_after_the_other(monkeypatch):
    async with plain() as (host, images, uri):
        host.answers["/a.png"] = ok(IMAGE)
        look_up = socket.getaddrinfo

        def look_up_two(name, port, **options):
            if name != "localhost":
                return look_up(name, port, **options)
            return [(2, 1, 6, "", ("127.0.0.2", port)), (2, 1, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(socket, "getaddrinfo", look_up_two)
        assert await images.fetch(f"{uri}/a.png") == IMAGE


async def test_a_host_that_is_not_listed_is_not_asked():
    async with plain() as (host, images, uri):
        with pytest.raises(ImageUriNotAllowed, match="not on a host"):
            await images.fetch(uri.replace("localhost", "127.0.0.1"))
    assert host.requests == []


async def test_redirects_on_the_same_host_are_followed():
    async with plain() as (host, images, uri):
        host.answers |= {"/a": redirect("/b"), "/b": redirect(f"{uri}/c"), "/c": ok(IMAGE)}
        assert await images.fetch(f"{uri}/a") == IMAGE


async def test_redirects_do_not_go_on_forever():
    async with plain() as (host, images, uri):
        host.answers["/a"] = redirect("/a")
        with pytest.raises(ImageFetchFailed, match="redirects more than 3 times"):
            await images.fetch(f"{uri}/a")
    assert len(host.requests) == 4


async def test_redirects_to_another_host_are_not_followed_even_where_it_is_listed():
    async with hosting() as host, hosting() as other:
        here, there = f"http://localhost:{host.port}", f"http://127.0.0.1:{other.port}"
        async with images_from(f"{here},{there}") as images:
            host.answers["/a"] = redirect(f"{there}/a")
            with pytest.raises(ImageUriNotAllowed, match="redirects to another host"):
                await images.fetch(f"{here}/a")
    assert other.requests == []


@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://169.254.169.254/", "//evil.org/"])
async def test_redirects_to_what_is_not_allowed_are_not_followed(location):
    async with plain() as (host, images, uri):
        host.answers["/a"] = redirect(location)
        with pytest.raises(ImageUriNotAllowed):
            await images.fetch(f"{uri}/a")


async def test_an_announced_length_above_the_limit_is_refused_without_reading():
    async with plain() as (host, images, uri):
        host.answers["/a"] = f"HTTP/1.1 200 OK\r\nContent-Length: {MAX_BYTES + 1}\r\n\r\n".encode()
        with pytest.raises(ImageError, match=f"larger than {MAX_BYTES} bytes") as caught:
            await images.fetch(f"{uri}/a")
    assert caught.value.too_large


async def test_an_image_without_end_is_cut_off_at_the_limit():
    ended = asyncio.Event()

    async def pour(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
                await writer.drain()
        finally:
            ended.set()

    async with plain() as (host, images, uri):
        host.answers["/a"] = pour
        with pytest.raises(ImageError, match="larger than"):
            await images.fetch(f"{uri}/a")
        await ended.wait()


async def test_an_image_of_just_the_limit_is_taken():
    async with plain() as (host, images, uri):
        host.answers["/a"] = ok(b"x" * MAX_BYTES)
        assert len(await images.fetch(f"{uri}/a")) == MAX_BYTES


async def test_a_host_that_does_not_answer_is_given_up():
    async with plain(timeout_s=0.1) as (host, images, uri):
        forever = asyncio.Event()
        host.answers["/a"] = lambda reader, writer: forever.wait()
        with pytest.raises(ImageFetchFailed, match=r"took longer than 0\.1 s"):
            await images.fetch(f"{uri}/a")
        forever.set()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered with status 404"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "answered with status 302"),
        (b"220 mail.example.org ESMTP\r\n", "did not answer as a web server"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "did not answer as a web server"),
        (b"", "did not answer as a web server"),
    ],
)
async def test_what_is_no_image_is_told_in_a_few_words(answer, told):
    async with plain() as (host, images, uri):
        host.answers["/a"] = answer
        with pytest.raises(ImageFetchFailed, match=told):
            await images.fetch(f"{uri}/a")


async def test_a_closed_port_is_told():
    async with plain() as (_, images, uri):
        pass
    async with images_from(uri) as images:
        with pytest.raises(ImageFetchFailed, match="could not be reached"):
            await images.fetch(f"{uri}/a")


async def test_a_name_that_stands_for_nothing_is_told(monkeypatch):
    async def fail(*_, **__):
        raise OSError("unknown")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fail)
    async with images_from("images.invalid") as images:
        with pytest.raises(ImageFetchFailed, match="could not be reached"):
            await images.fetch("https://images.invalid/a")


async def test_only_so_many_images_are_fetched_at_a_time():
    async with plain() as (host, images, uri):
        release = asyncio.Event()

        async def hold(reader: StreamReader, writer: StreamWriter) -> None:
            if host.num_open == MAX_CONCURRENT_FETCHES:
                release.set()
            await release.wait()
            writer.write(ok(IMAGE))

        host.answers["/a"] = hold
        fetches = [images.fetch(f"{uri}/a") for _ in range(3 * MAX_CONCURRENT_FETCHES)]
        assert await asyncio.gather(*fetches) == [IMAGE] * len(fetches)
    assert host.max_open <= MAX_CONCURRENT_FETCHES


async def test_hosts_that_do_not_answer_keep_the_fetches_of_one_tenant_waiting_and_no_others():
    async with plain() as (host, images, uri):
        release, has_share = asyncio.Event(), asyncio.Event()

        async def hold(reader: StreamReader, writer: StreamWriter) -> None:
            if host.num_open == MAX_CONCURRENT_FETCHES // 2:
                has_share.set()
            await release.wait()
            writer.write(ok(IMAGE))

        host.answers.update({"/slow": hold, "/a": ok(IMAGE)})
        slow = [
            asyncio.create_task(images.fetch(f"{uri}/slow", "mallory")) for _ in range(3 * MAX_CONCURRENT_FETCHES)
        ]
        await has_share.wait()
        for tenant in ("alice", "bob", "alice"):
            assert await images.fetch(f"{uri}/a", tenant) == IMAGE
        assert host.max_open == MAX_CONCURRENT_FETCHES // 2 + 1
        for task in slow[::2]:  # those that are cancelled hold and get no place
            task.cancel()
        release.set()
        assert set(await asyncio.gather(*slow[1::2])) == {IMAGE}
        assert host.max_open <= MAX_CONCURRENT_FETCHES


async def test_names_that_are_not_resolved_take_the_places_and_threads_of_one_tenant_only(monkeypatch):
    async with plain() as (host, images, uri):
        host.answers["/a"] = ok(IMAGE)
        loop, has_share, share = asyncio.get_running_loop(), asyncio.Event(), MAX_CONCURRENT_FETCHES // 2
        release, look_up, lookups = threading.Event(), socket.getaddrinfo, []

        def look_up_slowly(name, port, **options):
            lookups.append(name)
            if len(lookups) == share:
                loop.call_soon_threadsafe(has_share.set)
            if len(lookups) <= share:
                release.wait()
            return look_up(name, port, **options)

        monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
        try:
            for _ in range(2):  # the second time nothing is asked: the threads still have the places
                slow = [asyncio.create_task(images.fetch(f"{uri}/a", "mallory")) for _ in range(2 * share)]
                await has_share.wait()
                for task in slow:
                    task.cancel()
                await asyncio.wait(slow)
            assert len(lookups) == share
            assert await images.fetch(f"{uri}/a", "alice") == IMAGE
        finally:
            release.set()
        assert await images.fetch(f"{uri}/a", "mallory") == IMAGE


@pytest.mark.parametrize(
    ("uri", "content"),
    [
        ("data:image/png;base64," + base64.b64encode(IMAGE).decode(), IMAGE),
        ("DATA:;BASE64," + base64.b64encode(IMAGE).decode().replace("=", "%3D"), IMAGE),
        ("data:,a%20b", b"a b"),
    ],
)
async def test_data_uris_carry_their_image(uri, content):
    async with images_from("example.com") as images:
        assert await images.fetch(uri) == content


def asking(uri: str) -> wire.CompleteQueryRequest:
    return wire.CompleteQueryRequest(question="?", image={"uri": uri})


async def refused(rig: Serving, uri: str) -> str:
    """The reason that a request is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.vision.CompleteQuery(asking(uri))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad_request: Any = details_of(caught.value)["BadRequest"]
    assert [item.field for item in bad_request.field_violations] == ["image.uri"]
    assert rig.engine.requests == []
    return reason_of(caught.value)


@pytest.mark.parametrize("uri", ["https://example.com/a.png", "data:,abc", "file:///etc/passwd", ""])
async def test_no_server_fetches_images_unasked(uri):
    async with serving() as rig:
        assert await refused(rig, uri) == "IMAGE_URI_NOT_ALLOWED"


async def test_a_server_with_hosts_refuses_all_others_and_those_inside_the_network():
    async with serving(image_hosts=parse_hosts("example.com,localhost")) as rig:
        for uri in ("https://evil.org/a.png", "https://localhost/a.png", ""):
            assert await refused(rig, uri) == "IMAGE_URI_NOT_ALLOWED"


async def test_every_task_takes_images_by_address():
    async with plain() as (host, images, uri):
        host.answers["/a.png"] = ok(IMAGE)
        engine = FakeEngine()
        async with Server(engine, ServerConfig(port=0), images=images) as server, open_channel(server) as channel:
            rig = Serving(server, engine, channel)
            image = {"uri": f"{uri}/a.png"}
            assert [event async for event in rig.vision.Query(wire.QueryRequest(question="?", image=image))]
            assert [event async for event in rig.vision.Caption(wire.CaptionRequest(image=image))]
            await rig.vision.CompleteQuery(asking(f"{uri}/a.png"), timeout=60)
            await rig.vision.CompleteCaption(wire.CompleteCaptionRequest(image=image))
            await rig.vision.Point(wire.PointRequest(object="bird", image=image))
            await rig.vision.Detect(wire.DetectRequest(object="bird", image=image))
            await rig.vision.Segment(wire.SegmentRequest(object="bird", image=image))
            await rig.vision.CompleteQuery(asking("data:,abc"))
            host.answers["/a.png"] = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
            engine_requests, engine.requests = engine.requests, []
            assert await refused(rig, f"{uri}/a.png") == "IMAGE_FETCH_FAILED"
    assert [request.images for request in engine_requests] == [(IMAGE,)] * 7 + [(b"abc",)]


@asynccontextmanager
async def rig_of(engine: FakeEngine, images: RemoteImages) -> AsyncIterator[Serving]:
    async with Server(engine, ServerConfig(port=0), images=images) as server, open_channel(server) as channel:
        yield Serving(server, engine, channel)


async def test_an_image_is_not_fetched_for_a_request_that_the_queue_has_no_room_for():
    async with plain() as (host, images, uri), rig_of(FakeEngine(max_queued_requests=0), images) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteQuery(asking(f"{uri}/a.png"))
    assert reason_of(caught.value) == "QUEUE_FULL"
    assert host.requests == []


async def test_an_image_is_not_fetched_for_a_request_that_is_wrong_otherwise():
    async with plain() as (host, images, uri), rig_of(FakeEngine(), images) as rig:
        request = wire.CompleteQueryRequest(question=" ", image={"uri": f"{uri}/a.png"}, sampling={"top_p": 2.0})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteQuery(request)
    bad_request: Any = details_of(caught.value)["BadRequest"]
    assert [item.field for item in bad_request.field_violations] == ["question", "sampling.top_p"]
    assert host.requests == []


async def test_a_request_whose_image_is_being_fetched_counts_as_waiting_and_keeps_no_message_from_coming():
    async with plain() as (host, images, uri):
        is_asked, goes_on = asyncio.Event(), asyncio.Event()

        async def hesitate(reader: StreamReader, writer: StreamWriter) -> None:
            is_asked.set()
            await goes_on.wait()
            writer.write(ok(IMAGE))

        host.answers["/a.png"] = hesitate
        async with rig_of(FakeEngine(max_queued_requests=20), images) as rig:
            calls = [rig.vision.CompleteQuery(asking(f"{uri}/a.png")) for _ in range(19)]
            await is_asked.wait()
            while rig.engine.num_expected < 19:
                await rig.health.Check(HealthCheckRequest())
            assert await rig.vision.CompleteQuery(wire.CompleteQueryRequest(question="?"))
            last = rig.vision.CompleteQuery(asking(f"{uri}/a.png"))
            while rig.engine.num_expected < 20:
                await rig.health.Check(HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.vision.CompleteQuery(asking(f"{uri}/a.png"))
            assert reason_of(caught.value) == "QUEUE_FULL"
            goes_on.set()
            await asyncio.gather(*calls, last)
            assert rig.engine.num_expected == 0


async def test_an_address_of_an_empty_file_is_no_image():
    async with plain() as (host, images, uri), rig_of(FakeEngine(), images) as rig:
        host.answers["/a.png"] = ok(b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteQuery(asking(f"{uri}/a.png"))
    bad_request: Any = details_of(caught.value)["BadRequest"]
    assert [item.field for item in bad_request.field_violations] == ["image"]


async def test_a_caller_that_hangs_up_ends_the_fetching_of_its_image():
    async with plain() as (host, images, uri):
        has_begun, has_ended = asyncio.Event(), asyncio.Event()

        async def pour(reader: StreamReader, writer: StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            has_begun.set()
            await reader.read()  # until the client closes the connection
            has_ended.set()

        host.answers["/a.png"] = pour
        engine = FakeEngine()
        async with Server(engine, ServerConfig(port=0), images=images) as server, open_channel(server) as channel:
            call = Serving(server, engine, channel).vision.CompleteQuery(asking(f"{uri}/a.png"))
            await has_begun.wait()
            call.cancel()
            await has_ended.wait()
    assert engine.requests == []
