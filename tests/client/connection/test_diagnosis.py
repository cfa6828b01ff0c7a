"""Each way of not reaching a server has a line of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from kestrel_client.connection.diagnosis import why_no_answer
from kestrel_client.connection.tls import ClientTls
from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.frontends.grpc.connections.ports import server_credentials
from tests.server.certificates import Pair


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pair(tmp_path: Path, authority: trustme.CA) -> Pair:
    pair = Pair.within(tmp_path)
    pair.write(authority)
    return pair


def written(authority: trustme.CA, path: Path) -> Path:
    authority.cert_pem.write_to_path(str(path))
    return path


def client_tls(folder: Path, trusted: trustme.CA, authority: trustme.CA | None = None) -> ClientTls:
    """TLS that trusts one authority, and shows a certificate of another if there is one."""
    ca = written(trusted, folder / "ca.pem")
    if authority is None:
        return ClientTls(ca, None, None)
    leaf, certificate, key = authority.issue_cert("someone"), folder / "client.pem", folder / "client.key"
    leaf.cert_chain_pems[0].write_to_path(str(certificate))
    leaf.private_key_pem.write_to_path(str(key))
    return ClientTls(ca, certificate, key)


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = (
        server.add_insecure_port("127.0.0.1:0")
        if credentials is None
        else server.add_secure_port("127.0.0.1:0", credentials)
    )
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def why(address: str, tls: ClientTls | None = None) -> str | None:
    return await asyncio.to_thread(why_no_answer, address, tls)


async def test_a_server_that_can_be_reached_is_no_case_for_a_line(tmp_path, pair, authority):
    async with serving() as address:
        assert await why(address) is None
        assert await why(f"dns:///{address}") is None
        assert await why(f"ipv4:{address}") is None
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address:
        assert await why(address, client_tls(tmp_path, authority)) is None


def test_an_address_of_another_kind_is_not_judged():
    assert why_no_answer("xds:///kestrel", None) is None
    assert why_no_answer("ipv4:127.0.0.1:1,127.0.0.1:2", None) is None


@pytest.mark.parametrize("written", ["127.0.0.1:{}", "dns:127.0.0.1:{}", "localhost:{}"])
def test_nothing_listens_there(written):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = written.format(unused.getsockname()[1])
        assert why_no_answer(address, None) == f"no server listens at {address}: connection refused"


def test_the_name_is_not_known():
    line = why_no_answer("no-such-host.invalid:50051", None)
    assert line is not None
    assert line.startswith("the name no-such-host.invalid cannot be resolved: ")


def test_the_host_does_not_answer():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        full = [socket.socket() for _ in range(3)]
        for queued in full:
            queued.setblocking(False)
            queued.connect_ex(deaf.getsockname())
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        assert why_no_answer(address, None, timeout_s=0.2) == f"{address} does not answer within 0.2 s"
        for queued in full:
            queued.close()


def test_no_unix_socket_is_there(tmp_path):
    address = f"unix:{tmp_path / 'kestrel.sock'}"
    assert why_no_answer(address, None) == f"no server listens at {address}: No such file or directory"


async def test_the_server_speaks_no_tls(tmp_path, authority):
    async with serving() as address:
        line = await why(address, client_tls(tmp_path, authority))
    assert line == f"{address} speaks no TLS; leave out https://, tls_ca, --tls-ca and KESTREL_GRPC_TLS_CA"


async def test_the_server_speaks_tls_only(pair):
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address:
        line = await why(address)
    assert line == (
        f"{address} speaks TLS only; give its CA by tls_ca, --tls-ca or KESTREL_GRPC_TLS_CA, "
        "or write https:// for the CAs of this system"
    )


async def test_the_port_speaks_http_1():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        line = await why(address)
    assert line == f"{address} speaks HTTP/1.1 and no gRPC; gRPC has a port of its own, by default 50051"


async def test_an_encryption_that_is_not_known_is_not_tried(pair):
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address:
        assert await asyncio.to_thread(why_no_answer, address, None, tries_handshake=False) is None


async def test_the_certificate_is_of_an_unknown_authority(tmp_path, pair):
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address:
        line = await why(address, client_tls(tmp_path, trustme.CA()))
    assert line is not None
    assert line.startswith(f"the certificate of {address} is not trusted: ")


async def test_the_certificate_has_another_name_or_is_too_old(tmp_path, pair, authority):
    tls = client_tls(tmp_path, authority)
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address:
        named = ClientTls(tls.ca, None, None, server_name="elsewhere.example")
        other_name = await why(address, named)
        pair.write(authority, expires=datetime.now(UTC) - timedelta(hours=1))
        expired = await why(address, tls)
    assert other_name is not None
    assert "not valid for 'elsewhere.example'" in other_name
    assert expired == f"the certificate of {address} is not trusted: certificate has expired"


async def test_the_server_asks_for_another_client_certificate(tmp_path, pair, authority):
    clients = trustme.CA()
    files = CertificateFiles(pair.certificate, pair.key, written(clients, tmp_path / "clients.pem"))
    credentials = server_credentials(files)
    async with serving(credentials) as address:
        without = await why(address, client_tls(tmp_path, authority))
        another = await why(address, client_tls(tmp_path, authority, trustme.CA()))
        good = await why(address, client_tls(tmp_path, authority, clients))
    advice = "give tls_client_certificate and tls_client_key"
    closes = f"{address} closes encrypted connections at once; if it asks clients for"
    assert without == f"{closes} a certificate, {advice}"
    assert another == f"{closes} another certificate, {advice}"
    assert good is None
