"""How a client reaches its server: what describes a connection, its files, and why no server answers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from google.rpc import code_pb2

from kestrel_client import AsyncClient, Client, ServerError, Unavailable
from kestrel_client._version import VERSION
from kestrel_client.connection import ClientTls, target_of, why_no_answer
from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.frontends.grpc.ports import server_credentials
from tests.client import canned
from tests.client.canned import CannedVision
from tests.server.certificates import Pair


def test_the_server_learns_which_client_calls(client: Client, vision: CannedVision):
    client.point(b"picture", "kite")
    assert str(vision.metadata[0]["user-agent"]).startswith(f"kestrel-client/{VERSION} ")


def test_a_call_with_a_large_image_is_repeated_too(client: Client, vision: CannedVision):
    vision.failures = [canned.status(code_pb2.UNAVAILABLE, "draining")]
    image = bytes(2 * 1024 * 1024)
    assert client.point(image, "kite").points
    assert [len(request.image.data) for request in vision.requests] == [len(image)] * 2


def test_an_answer_larger_than_the_default_limit_arrives(client: Client, vision: CannedVision):
    vision.answer_pieces = ("x" * 5 * 1024 * 1024,)
    assert len(client.complete_query(None, "q").answer) == 5 * 1024 * 1024


@pytest.mark.parametrize(
    ("address", "target", "is_encrypted"),
    [
        ("here:1", "here:1", None),
        ("here", "here:50051", None),
        ("127.0.0.1", "127.0.0.1:50051", None),
        ("[::1]:7", "[::1]:7", None),
        ("[::1]", "[::1]:50051", None),
        ("http://here:1/", "here:1", False),
        ("HTTP://here", "here:50051", False),
        ("grpc://here:1", "here:1", False),
        ("https://here:1", "here:1", True),
        ("grpcs://here", "here:50051", True),
        ("unix:/run/a b.sock", "unix:/run/a b.sock", None),
        ("dns:///here:1", "dns:///here:1", None),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2", None),
    ],
)
def test_an_address_is_a_host_a_url_or_a_target(address: str, target: str, is_encrypted: bool | None):
    assert target_of(address) == (target, is_encrypted)


@pytest.mark.parametrize(
    "address",
    ["ftp://here", "here:port", "here:0", "here:65536", "::1", "http://here/v1", "a b", "user@here:1", "a:1,b:2"],
)
def test_what_is_no_address_is_refused_with_what_one_is(address: str):
    with pytest.raises(ValueError, match="is no address of a server: an address is host:port, host "):
        Client(address)


def test_a_url_without_encryption_does_not_go_with_a_ca():
    with pytest.raises(ValueError, match="write https://, or name no CA"):
        Client("http://here:1", tls_ca="ca.pem")


async def test_a_ca_comes_from_an_argument_or_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    authority, pair, ca = trustme.CA(), Pair.within(tmp_path), tmp_path / "ca.pem"
    pair.write(authority)
    authority.cert_pem.write_to_path(str(ca))
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address:

        async def reaches_the_server(address: str, tls_ca: str | None = None) -> bool:
            async with AsyncClient(address, max_retries=0, tls_ca=tls_ca) as client:
                with pytest.raises(ServerError, match="Method not found") as caught:
                    await client.load()
            return caught.value.reason == "UNIMPLEMENTED"

        assert await reaches_the_server(address, tls_ca=str(ca))
        assert await reaches_the_server(f"https://{address}", tls_ca=str(ca))
        monkeypatch.setenv("KESTREL_GRPC_TLS_CA", str(ca))
        assert await reaches_the_server(address)
        async with AsyncClient(address, max_retries=0, tls_ca="") as client:
            with pytest.raises(Unavailable, match="speaks TLS only; give its CA by tls_ca") as caught:
                await client.load()
        assert caught.value.reason == "SERVER_UNREACHABLE"
        monkeypatch.delenv("KESTREL_GRPC_TLS_CA")
        async with AsyncClient(f"https://{address}", max_retries=0) as client:
            with pytest.raises(Unavailable, match=f"the certificate of {address} is not trusted"):
                await client.load()


def test_files_that_cannot_be_used_are_named(tmp_path, pair):
    other = Pair.within(tmp_path / "other")
    other.key.parent.mkdir()
    other.write(trustme.CA())
    for ca in (pair.key, tmp_path / "binary"):
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=f"{ca} holds no certificates in PEM format"):
            ClientTls(ca, None, None).credentials()
    for key in (other.key, pair.certificate):
        with pytest.raises(ValueError, match=f"{pair.certificate} and {key} are not a certificate and its unenc"):
            ClientTls(None, pair.certificate, key).credentials()
    missing = tmp_path / "missing"
    for tls in (ClientTls(missing, None, None), ClientTls(None, pair.certificate, missing)):
        with pytest.raises(FileNotFoundError) as caught:
            tls.credentials()
        assert caught.value.filename == str(missing)


def test_another_name_is_asked_for_only_where_it_is_given(pair):
    assert ClientTls(pair.certificate, None, None).channel_options() == ()
    named = ClientTls(pair.certificate, None, None, server_name="kestrel")
    assert named.channel_options() == (("grpc.ssl_target_name_override", "kestrel"),)


def test_files_come_from_arguments_or_from_the_environment():
    environment = {"KESTREL_GRPC_TLS_CA": "a.pem"}
    assert ClientTls.named(None, None, None, environment) == ClientTls(Path("a.pem"))
    assert ClientTls.named(Path("b.pem"), None, None, environment) == ClientTls(Path("b.pem"))
    assert ClientTls.named("", None, None, environment) is None
    assert ClientTls.named(None, None, None, {}) is None


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
    files = CertificateFiles(pair.certificate, pair.key)
    async with serving(server_credentials(files)) as address:
        named = ClientTls(tls.ca, None, None, server_name="elsewhere.example")
        other_name = await why(address, named)
        pair.write(authority, expires=datetime.now(UTC) - timedelta(hours=1))
        assert files.refresh()
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
