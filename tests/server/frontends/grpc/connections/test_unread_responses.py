"""Responses that are not read: their connection is closed, and no other one."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kestrel_client.v1 import image_service_pb2
from kestrel_grpc.frontends.grpc.connections.own_sockets import OwnSockets
from kestrel_grpc.frontends.grpc.connections.unread_responses import LARGE_BYTES, close_connection
from tests.journey.http2 import Http2Client
from tests.server.serving import Serving, serving

GET = "/kestrel.v1.ImageService/GetImage"
MAX_WAIT_S = 20


async def stored(rig: Serving, num_bytes: int) -> image_service_pb2.GetImageRequest:
    """Store an image; returns what asks for its file."""
    put = await rig.images.PutImage(image_service_pb2.PutImageRequest(data=bytes(num_bytes)))
    return image_service_pb2.GetImageRequest(image_id=put.image.image_id, include_data=True)


async def open_calls_end(rig: Serving) -> None:
    async with asyncio.timeout(MAX_WAIT_S):
        await rig.server._groups.ended()  # pyright: ignore[reportPrivateUsage]


async def is_closed(client: Http2Client) -> None:
    """Wait until the server has closed the connection."""
    async with asyncio.timeout(MAX_WAIT_S):
        async for _ in client.events():
            pass


async def test_who_does_not_read_a_file_loses_the_connection_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel_grpc.frontends.grpc.images.service._MAX_SENT_AT_ONCE", 1)
    async with serving(stream_idle_timeout=0.2) as rig:
        request = await stored(rig, LARGE_BYTES + 1)
        async with Http2Client.connected(rig.address, window_bytes=100) as client:
            await client.ask(GET, request)
            await is_closed(client)
            await open_calls_end(rig)
            assert len((await rig.images.GetImage(request)).data) == LARGE_BYTES + 1, "others are not disturbed"


async def test_a_file_that_is_read_in_time_costs_no_connection() -> None:
    async with serving(stream_idle_timeout=30.0) as rig:
        request = await stored(rig, LARGE_BYTES + 1)
        async with Http2Client.connected(rig.address) as client, asyncio.timeout(MAX_WAIT_S):
            for _ in range(2):
                stream = await client.ask(GET, request)
                body, trailers = await client.read(stream)
                assert len(body) > LARGE_BYTES
                assert trailers["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("family", "host", "name"),
    [
        (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"),
        (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}"),
    ],
)
def test_only_the_connection_of_that_peer_is_closed(family: socket.AddressFamily, host: str, name: str) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        address = listener.getsockname()
        with socket.create_connection(address[:2]) as one, socket.create_connection(address[:2]) as other:
            one.settimeout(MAX_WAIT_S)
            accepted = [listener.accept()[0] for _ in range(2)]
            sockets = OwnSockets([address[1]])
            try:
                assert close_connection(sockets, name.format(one.getsockname()[1]))
                assert not close_connection(sockets, name.format(address[1])), "no caller is there"
                assert not close_connection(sockets, "unix:")
            finally:
                sockets.close()
            assert one.recv(1) == b""
            other.sendall(b"x")
            assert [item.recv(1) for item in accepted] == [b"", b"x"]
            for item in accepted:
                item.close()


def test_a_caller_of_ipv4_is_found_on_a_socket_of_ipv6() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no sockets for both")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0]:
            sockets = OwnSockets([port])
            try:
                assert close_connection(sockets, f"ipv4:127.0.0.1:{client.getsockname()[1]}")
            finally:
                sockets.close()
