"""Connections that are ended, and those that are let alone."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kestrel_grpc.frontends.grpc.connections.hang_up import hang_up
from kestrel_grpc.frontends.grpc.connections.own_sockets import OwnSockets


@dataclass(frozen=True)
class Connection:
    """A listener, and both ends of a connection to it."""

    listener: socket.socket
    accepted: socket.socket
    client: socket.socket

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connection(stack: ExitStack, listener: socket.socket) -> Connection:
    stack.enter_context(listener)
    client = stack.enter_context(socket.socket(listener.family))
    client.settimeout(20)
    client.connect(listener.getsockname())
    accepted = stack.enter_context(listener.accept()[0])
    return Connection(listener, accepted, client)


@pytest.fixture
def tcp(stack: ExitStack) -> Connection:
    return connection(stack, socket.create_server(("127.0.0.1", 0)))


def hang_up_on(ports: Collection[int], paths: Collection[str] = ()) -> None:
    sockets = OwnSockets(ports, paths)
    hang_up(sockets)
    sockets.close()


def test_the_client_gets_what_was_sent_and_then_the_end(tcp: Connection) -> None:
    tcp.accepted.sendall(b"the last word")
    hang_up_on([tcp.port])
    assert tcp.client.recv(100) == b"the last word"
    assert tcp.client.recv(100) == b""
    tcp.client.sendall(b"still heard")
    assert tcp.accepted.recv(100) == b"still heard"


def test_no_further_connection_is_made(tcp: Connection) -> None:
    hang_up_on([tcp.port])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", tcp.port), timeout=20)


def test_other_connections_are_let_alone(tcp: Connection) -> None:
    hang_up_on([tcp.client.getsockname()[1] + 1, 1])
    tcp.accepted.sendall(b"a")
    assert tcp.client.recv(100) == b"a"


def test_sockets_in_the_file_system_are_known_by_their_path(stack: ExitStack, tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    unix = connection(stack, listener)
    hang_up_on([], [path])
    assert unix.client.recv(100) == b""


def test_connections_end_although_no_descriptor_is_left(tcp: Connection) -> None:
    sockets = OwnSockets([tcp.port])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, before[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        hang_up(sockets)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in taken:
            os.close(number)
        sockets.close()
    assert tcp.client.recv(100) == b""


def test_no_descriptor_is_left_behind_or_closed(tcp: Connection) -> None:
    before = set(os.listdir("/dev/fd"))
    hang_up_on([tcp.port])
    assert set(os.listdir("/dev/fd")) == before
    assert tcp.accepted.fileno() >= 0
    tcp.accepted.getpeername()
