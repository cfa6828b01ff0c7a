"""The HTTP port for machines, asked over a real socket."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kestrel_grpc.telemetry import http_health
from kestrel_grpc.telemetry.http_health import MAX_CONNECTIONS, HealthPort


class Facts:
    """What the probes are told."""

    def __init__(self) -> None:
        self.is_alive = True
        self.is_ready = True


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture
def port(facts) -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("answer", "of all", registry=registry).set(42)
    probes = HealthPort(registry, is_alive=lambda: facts.is_alive, is_ready=lambda: facts.is_ready)
    probes.open("127.0.0.1", 0)
    assert probes.port is not None
    yield probes.port
    probes.close()
    probes.close()


def get(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_metrics_are_prometheus_text(port):
    status, text = get(port, "/metrics")
    assert status == 200
    assert "answer 42.0" in text


def test_readiness_and_life_follow_what_they_are_told(port, facts):
    assert (get(port, "/readyz")[0], get(port, "/healthz")[0]) == (200, 200)
    facts.is_ready = False
    assert (get(port, "/readyz")[0], get(port, "/healthz")[0]) == (503, 200)
    facts.is_alive = False
    assert get(port, "/healthz")[0] == 503


def test_other_paths_are_not_found(port):
    assert get(port, "/")[0] == 404


def test_a_client_that_connects_and_sends_nothing_delays_no_other(port):
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        assert get(port, "/readyz")[0] == 200


def test_beyond_a_number_of_connections_the_oldest_are_closed(port):
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MAX_CONNECTIONS + 8)
        ]
        assert get(port, "/readyz")[0] == 200
        assert [connection.recv(1) for connection in connections[:8]] == [b""] * 8
        assert sum("process_request_thread" in thread.name for thread in threading.enumerate()) <= MAX_CONNECTIONS


def test_a_client_that_sends_a_byte_at_a_time_has_no_more_time(port, monkeypatch):
    monkeypatch.setattr(http_health, "_CLIENT_TIMEOUT_S", 0.2)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        while not select.select([slow], [], [], 0.02)[0]:
            slow.sendall(b"G")
        # Closing with unread bytes is a reset.
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        assert get(port, "/readyz")[0] == 200


def test_a_port_in_use_is_an_error(port):
    second = HealthPort(CollectorRegistry(), is_alive=lambda: True, is_ready=lambda: True)
    with pytest.raises(OSError, match="in use"):
        second.open("127.0.0.1", port)
    second.close()


def test_a_closed_port_answers_no_more():
    probes = HealthPort(CollectorRegistry(), is_alive=lambda: True, is_ready=lambda: True)
    probes.open("127.0.0.1", 0)
    assert probes.port is not None
    probes.close()
    with pytest.raises(ConnectionRefusedError):
        get(probes.port, "/readyz")
