"""Connections that are closed, and those that are let alone."""

import asyncio
import contextlib
import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kestrel_client.v1 import image_service_pb2
from kestrel_grpc.frontends.grpc.connections import LARGE_BYTES, Connections, is_short_of_descriptors
from tests.journey.http2 import Http2Client
from tests.server.serving import Serving, serving

GET = "/kestrel.v1.ImageService/GetImage"
MAX_WAIT_S = 60
NUM_CLIENTS = 6


class Rig:
    """A listener, connections to it, and what closes them."""

    def __init__(self, stack: ExitStack, listener: socket.socket) -> None:
        self.listener = stack.enter_context(listener)
        self.clients: list[socket.socket] = []
        self.accepted: list[socket.socket] = []
        self._stack = stack
        address = listener.getsockname()
        is_unix = listener.family == socket.AF_UNIX
        self.connections = found(stack, () if is_unix else (address[1],), (address,) if is_unix else ())
        for _ in range(NUM_CLIENTS):
            self.connect(listener.family, address)

    def connect(self, family: socket.AddressFamily, address: Any) -> socket.socket:
        client = self._stack.enter_context(socket.socket(family))
        client.settimeout(MAX_WAIT_S)
        client.connect(address)
        self.clients.append(client)
        self.accepted.append(self._stack.enter_context(self.listener.accept()[0]))
        return client

    def open_clients(self) -> list[int]:
        """The numbers of those whose connection still works."""
        found: list[int] = []
        for number, (client, accepted) in enumerate(zip(self.clients, self.accepted, strict=True)):
            try:
                accepted.sendall(b"a")
            except BrokenPipeError:
                assert client.recv(1) == b""
            else:
                assert client.recv(1) == b"a"
                found.append(number)
        return found


def found(stack: ExitStack, ports: tuple[int, ...], paths: tuple[str, ...] = ()) -> Connections:
    connections = Connections(MAX_WAIT_S, tuple)
    connections.open(ports, paths)
    stack.callback(connections.release)
    return connections


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def rig(stack: ExitStack) -> Rig:
    return Rig(stack, socket.create_server(("127.0.0.1", 0)))


def test_clients_get_what_was_sent_and_then_the_end(rig: Rig):
    rig.accepted[0].sendall(b"the last word")
    rig.connections.close_all()
    assert rig.clients[0].recv(100) == b"the last word"
    assert all(client.recv(100) == b"" for client in rig.clients)
    rig.clients[0].sendall(b"still heard")
    assert rig.accepted[0].recv(100) == b"still heard"


def test_no_further_connection_is_made(rig: Rig):
    rig.connections.close_all()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(rig.listener.getsockname(), timeout=MAX_WAIT_S)


def test_connections_of_other_ports_are_let_alone(rig: Rig, stack: ExitStack):
    others = found(stack, (rig.clients[0].getsockname()[1] + 1, 1))
    others.close_all()
    assert others.close_idle((), min_idle_s=0.0) == 0
    assert rig.open_clients() == list(range(NUM_CLIENTS))
    socket.create_connection(rig.listener.getsockname(), timeout=MAX_WAIT_S).close()


def test_connections_of_a_unix_socket_end_with_the_server_and_never_count_as_idle(stack: ExitStack, tmp_path: Path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "a.sock"))
    listener.listen()
    rig = Rig(stack, listener)
    assert rig.connections.close_idle((), min_idle_s=0.0) == 0
    assert not rig.connections.close_peer("unix:")
    assert not rig.connections.close_peer("ipv4:127.0.0.1:1")
    assert rig.open_clients() == list(range(NUM_CLIENTS))
    rig.connections.close_all()
    assert rig.open_clients() == []


def test_connections_end_although_no_descriptor_is_left(rig: Rig):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, before[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        rig.connections.close_all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in taken:
            os.close(number)
    assert rig.open_clients() == []


def test_no_descriptor_is_left_behind_or_closed(rig: Rig):
    rig.connections.release()
    before = set(os.listdir("/dev/fd"))
    rig.connections.open([rig.listener.getsockname()[1]])
    rig.connections.close_all()
    rig.connections.release()
    assert set(os.listdir("/dev/fd")) == before
    for accepted in rig.accepted:
        accepted.getpeername()


def test_a_connection_that_was_looked_at_can_still_be_closed_by_its_owner(rig: Rig):
    last = fcntl.fcntl(rig.accepted[0], fcntl.F_DUPFD, 500)  # what is looked at last
    assert not rig.connections.close_peer("ipv4:127.0.0.1:1")
    os.close(last)
    rig.accepted[0].close()
    assert rig.clients[0].recv(1) == b""


def test_nothing_is_closed_once_the_server_has_ended(rig: Rig):
    rig.connections.release()
    rig.connections.close_all()
    assert rig.connections.close_idle((), min_idle_s=0.0) == 0
    assert rig.open_clients() == list(range(NUM_CLIENTS))


needs_idle_times = pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="the system does not tell what is idle"
)


@needs_idle_times
def test_half_of_the_connections_are_closed_and_the_listener_stays(rig: Rig):
    assert rig.connections.close_idle((), min_idle_s=0.0) == NUM_CLIENTS // 2
    assert len(rig.open_clients()) == NUM_CLIENTS - NUM_CLIENTS // 2
    socket.create_connection(rig.listener.getsockname(), timeout=MAX_WAIT_S).close()


@needs_idle_times
def test_connections_with_open_calls_stay(rig: Rig):
    busy = [client.getsockname()[1] for client in rig.clients[1:]]
    assert rig.connections.close_idle(busy, min_idle_s=0.0) == 1
    assert rig.open_clients() == list(range(1, NUM_CLIENTS))


@needs_idle_times
def test_connections_that_were_used_just_now_stay(rig: Rig):
    assert rig.connections.close_idle((), min_idle_s=3600.0) == 0
    assert rig.open_clients() == list(range(NUM_CLIENTS))


@needs_idle_times
def test_a_connection_on_which_much_is_sent_and_nothing_comes_is_not_idle(rig: Rig):
    while not rig.connections.close_idle((), min_idle_s=0.05):
        rig.accepted[0].sendall(b"a")
    assert 0 in rig.open_clients()


def test_descriptors_run_out_before_the_last_is_taken():
    assert not is_short_of_descriptors()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 10, before[1]))
        assert is_short_of_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        assert is_short_of_descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("family", "host", "name"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}")],
)
def test_only_the_connection_of_that_peer_is_closed(
    family: socket.AddressFamily, host: str, name: str, stack: ExitStack
):
    rig = Rig(stack, socket.create_server((host, 0), family=family))
    assert rig.connections.close_peer(name.format(rig.clients[2].getsockname()[1]))
    assert not rig.connections.close_peer(name.format(rig.listener.getsockname()[1])), "no caller is there"
    assert rig.open_clients() == [0, 1, 3, 4, 5]


def test_a_caller_of_ipv4_is_found_on_a_socket_of_ipv6(stack: ExitStack):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no sockets for both")
    rig = Rig(stack, socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
    client = rig.connect(socket.AF_INET, ("127.0.0.1", rig.listener.getsockname()[1]))
    assert rig.connections.close_peer(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
    assert rig.open_clients() == list(range(NUM_CLIENTS))


async def test_a_response_that_was_read_in_time_closes_nothing_later(monkeypatch: pytest.MonkeyPatch):
    closed: list[str] = []
    monkeypatch.setattr(Connections, "close_peer", lambda _, peer: closed.append(peer))
    connections, timed_out = Connections(0.01, tuple), asyncio.Event()

    async def respond(peer: str) -> None:
        connections.expect_reader(LARGE_BYTES + 1, lambda: peer)
        if peer == "slow":
            asyncio.get_running_loop().call_later(0.05, timed_out.set)
            await timed_out.wait()

    await asyncio.gather(respond("fast"), respond("slow"))
    assert closed == ["slow"]


async def stored(rig: Serving, num_bytes: int) -> image_service_pb2.GetImageRequest:
    """Store an image; returns what asks for its file."""
    put = await rig.images.PutImage(image_service_pb2.PutImageRequest(data=bytes(num_bytes)))
    return image_service_pb2.GetImageRequest(image_id=put.image.image_id, include_data=True)


async def test_who_does_not_read_a_file_loses_the_connection_and_the_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kestrel_grpc.frontends.grpc.image_service._MAX_SENT_AT_ONCE", 1)
    async with serving(stream_idle_timeout=2.0) as rig, asyncio.timeout(MAX_WAIT_S):
        request = await stored(rig, LARGE_BYTES + 1)
        async with Http2Client.connected(rig.address, window_bytes=100) as client:
            await client.ask(GET, request)
            async for _ in client.events():  # until the server has closed the connection
                pass
            await rig.server._groups.ended()
            assert len((await rig.images.GetImage(request)).data) == LARGE_BYTES + 1, "others are not disturbed"


async def test_a_file_that_is_read_in_time_costs_no_connection():
    async with serving(stream_idle_timeout=30.0) as rig:
        request = await stored(rig, LARGE_BYTES + 1)
        async with Http2Client.connected(rig.address) as client, asyncio.timeout(MAX_WAIT_S):
            for _ in range(2):
                stream = await client.ask(GET, request)
                body, trailers = await client.read(stream)
                assert len(body) > LARGE_BYTES
                assert trailers["grpc-status"] == "0"
