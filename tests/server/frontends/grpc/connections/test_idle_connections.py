"""Connections that are closed where descriptors run out, and those that are not."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kestrel_grpc.frontends.grpc.connections.idle_connections import close_idle, is_short_of_descriptors
from kestrel_grpc.frontends.grpc.connections.own_sockets import OwnSockets

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not tell what is idle")
NUM_CLIENTS = 6


class Rig:
    """A listener, and connections to it."""

    def __init__(self, stack: ExitStack) -> None:
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.clients: list[socket.socket] = []
        self.accepted: list[socket.socket] = []
        for _ in range(NUM_CLIENTS):
            client = stack.enter_context(socket.create_connection(self.listener.getsockname(), timeout=20))
            self.clients.append(client)
            self.accepted.append(stack.enter_context(self.listener.accept()[0]))
        self.sockets = OwnSockets([self.listener.getsockname()[1]])
        stack.callback(self.sockets.close)

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


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack)


def test_half_of_the_connections_are_closed_and_the_listener_stays(rig: Rig) -> None:
    assert close_idle(rig.sockets, (), min_idle_s=0.0) == NUM_CLIENTS // 2
    assert len(rig.open_clients()) == NUM_CLIENTS - NUM_CLIENTS // 2
    socket.create_connection(rig.listener.getsockname(), timeout=20).close()


def test_connections_with_open_calls_stay(rig: Rig) -> None:
    busy = [client.getsockname()[1] for client in rig.clients[1:]]
    assert close_idle(rig.sockets, busy, min_idle_s=0.0) == 1
    assert rig.open_clients() == list(range(1, NUM_CLIENTS))


def test_connections_that_were_used_just_now_stay(rig: Rig) -> None:
    assert close_idle(rig.sockets, (), min_idle_s=3600.0) == 0
    assert rig.open_clients() == list(range(NUM_CLIENTS))


def test_other_connections_of_the_process_stay(rig: Rig) -> None:
    others = OwnSockets([1])
    assert close_idle(others, (), min_idle_s=0.0) == 0
    others.close()


def test_nothing_is_closed_once_the_server_has_ended(rig: Rig) -> None:
    rig.sockets.close()
    assert close_idle(rig.sockets, (), min_idle_s=0.0) == 0
    assert len(rig.open_clients()) == NUM_CLIENTS


def test_descriptors_run_out_before_the_last_is_taken() -> None:
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
