"""No proxy between a client and a server on the same machine."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kestrel_client import AsyncClient, Client, KestrelClientError
from kestrel_client.this_machine import is_this_machine

HERE = (
    *("localhost:50051", "LOCALHOST:1", "localhost.:50051", "kestrel.localhost:7", "ip6-localhost:1"),
    *("127.0.0.1:50051", "127.0.0.2:7", "127.1:7", "0.0.0.0:7", "[::1]:7", "[::]:7", "[::ffff:127.0.0.1]:7"),
    *("unix:/run/kestrel.sock", "unix:///run/kestrel.sock", "unix-abstract:kestrel", "vsock:1:7"),
    *("dns:///localhost:50051", "dns:localhost:1", "dns://192.0.2.5:53/localhost:7", "dns:///[::1]:7"),
    *("ipv4:127.0.0.1:1,127.0.0.2:2", "ipv6:[::1]:7", "ipv6:%5B::1%5D:7"),
    *(f"{socket.gethostname()}:50051", f"dns:///{socket.gethostname().upper()}:7"),
)
ELSEWHERE = (
    *("kestrel.example.com:50051", "dns:///kestrel.example.com:7", "localhost.example.com:7", "notlocalhost:7"),
    *("192.0.2.7:50051", "[2001:db8::7]:7", "ipv4:127.0.0.1:1,192.0.2.7:1", "dns:///192.0.2.7:7"),
    *("xds:///localhost", f"{socket.gethostname()}.example.com:7", "127.0.0.1.example.com:7"),
)


@pytest.mark.parametrize("target", HERE)
def test_a_target_on_this_machine_is_known_as_one(target: str):
    assert is_this_machine(target)


@pytest.mark.parametrize("target", ELSEWHERE)
def test_a_target_elsewhere_is_not_taken_for_this_machine(target: str):
    assert not is_this_machine(target)


class Proxy:
    """Refuses every connection, and keeps what it was asked for."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[bytes] = []
        self.was_asked = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(4096).partition(b"\r\n")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            self.was_asked.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(params=["http_proxy", "https_proxy", "grpc_proxy"])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    found = Proxy()
    monkeypatch.setenv(request.param, found.url)
    yield found
    found.close()


def test_a_client_reaches_this_machine_without_the_proxy(address: str, proxy: Proxy):
    for place in (address, f"http://{address}", f"dns:///{address.replace('127.0.0.1', 'localhost')}"):
        with Client(place, max_retries=0) as client:
            assert client.point(b"picture", "kite").points
    assert proxy.asked == []


async def test_an_asynchronous_client_reaches_this_machine_without_the_proxy(address: str, proxy: Proxy):
    async with AsyncClient(address, max_retries=0) as client:
        assert (await client.point(b"picture", "kite")).points
    assert proxy.asked == []


@pytest.mark.parametrize("proxy", ["http_proxy"], indirect=True)
def test_a_server_elsewhere_is_asked_through_the_proxy(proxy: Proxy):
    with Client("192.0.2.7:50051", max_retries=0, timeout_s=30.0) as client, pytest.raises(KestrelClientError):
        client.point(b"picture", "kite")
    assert proxy.was_asked.wait(30.0)
    assert proxy.asked[0] == b"CONNECT 192.0.2.7:50051 HTTP/1.1"
