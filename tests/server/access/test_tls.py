import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kestrel_grpc.access import reloaded_files, tls
from kestrel_grpc.access.reloaded_files import read_regular_file
from kestrel_grpc.access.tls import CertificateError, CertificateFiles
from kestrel_grpc.frontends.grpc.ports import server_credentials
from tests.server.certificates import Pair, replace, trusting

METHOD = "/test.Echo/Echo"


async def echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return request


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials) -> AsyncIterator[str]:
    """A server that echoes, and its address."""
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def connection(address: str, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    """A connection of its own, which no other channel shares."""
    return grpc.aio.secure_channel(address, credentials, options=(("grpc.use_local_subchannel_pool", 1),))


async def ask(channel: grpc.aio.Channel) -> bytes:
    return await channel.unary_unary(METHOD)(b"hello", timeout=60)


async def can_ask(address: str, credentials: grpc.ChannelCredentials) -> bool:
    """Whether a new connection is possible."""
    async with connection(address, credentials) as channel:
        try:
            return await ask(channel) == b"hello"
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def other_authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pair(tmp_path: Path, authority: trustme.CA) -> Pair:
    pair = Pair.within(tmp_path)
    pair.write(authority)
    return pair


async def test_only_clients_that_trust_the_certificate_get_in(pair, authority, other_authority):
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address:
        assert await can_ask(address, trusting(authority))
        assert not await can_ask(address, trusting(other_authority))


async def test_a_plaintext_client_does_not_get_in(pair):
    async with (
        serving(server_credentials(CertificateFiles(pair.certificate, pair.key))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_new_certificate_serves_new_connections_and_open_ones_stay(pair, authority, other_authority):
    files = CertificateFiles(pair.certificate, pair.key)
    async with serving(server_credentials(files)) as address, connection(address, trusting(authority)) as before:
        assert await ask(before) == b"hello"
        pair.write(other_authority)
        assert files.refresh()
        assert await can_ask(address, trusting(other_authority))
        assert not await can_ask(address, trusting(authority))
        assert await ask(before) == b"hello"


async def test_a_mount_that_does_not_answer_stops_no_handshake_and_is_followed_once_it_does(
    pair, authority, other_authority, caplog, monkeypatch
):
    files = CertificateFiles(pair.certificate, pair.key)
    may_go_on = threading.Event()

    def hangs(path: Path) -> bytes:
        may_go_on.wait()
        return read_regular_file(path)

    async with serving(server_credentials(files)) as address:
        pair.write(other_authority)
        monkeypatch.setattr(tls, "read_regular_file", hangs)
        monkeypatch.setattr(reloaded_files, "READ_TIMEOUT_S", 0.01)
        try:
            assert not await files.refresh_in_thread()
            assert await can_ask(address, trusting(authority))
        finally:
            may_go_on.set()
        assert "does not answer" in caplog.text
        monkeypatch.setattr(reloaded_files, "READ_TIMEOUT_S", 20.0)
        assert await files.refresh_in_thread()
        assert await can_ask(address, trusting(other_authority))


async def test_an_expired_certificate_is_refused_until_it_is_renewed(pair, authority):
    pair.write(authority, expires=datetime.now(UTC) - timedelta(hours=1))
    files = CertificateFiles(pair.certificate, pair.key)
    async with serving(server_credentials(files)) as address:
        assert not await can_ask(address, trusting(authority))
        pair.write(authority)
        assert files.refresh()
        assert await can_ask(address, trusting(authority))


async def test_a_broken_pair_keeps_the_old_one_and_is_logged(pair, authority, caplog):
    files = CertificateFiles(pair.certificate, pair.key)
    async with serving(server_credentials(files)) as address:
        replace(pair.certificate, b"-----BEGIN CERTIFICATE-----\nnonsense")
        assert not files.refresh()
        assert await can_ask(address, trusting(authority))
    assert "stays in force" in caplog.text
    assert str(pair.certificate) in caplog.text


async def test_a_key_that_is_not_yet_that_of_the_certificate_keeps_the_old_pair(pair, authority, other_authority):
    files = CertificateFiles(pair.certificate, pair.key)
    async with serving(server_credentials(files)) as address:
        leaf = other_authority.issue_cert("127.0.0.1")
        replace(pair.key, leaf.private_key_pem.bytes())
        assert not files.refresh()
        assert await can_ask(address, trusting(authority))
        replace(pair.certificate, leaf.cert_chain_pems[0].bytes())
        assert files.refresh()
        assert await can_ask(address, trusting(other_authority))


async def test_clients_need_a_certificate_of_the_named_authority(pair, authority, other_authority, tmp_path):
    client_ca = tmp_path / "clients.pem"
    replace(client_ca, other_authority.cert_pem.bytes())
    async with serving(server_credentials(CertificateFiles(pair.certificate, pair.key, client_ca))) as address:
        assert not await can_ask(address, trusting(authority))
        assert not await can_ask(address, trusting(authority, authority.issue_cert("client")))
        assert await can_ask(address, trusting(authority, other_authority.issue_cert("client")))


async def test_another_authority_for_clients_counts_from_the_next_connection(
    pair, authority, other_authority, tmp_path
):
    client_ca = tmp_path / "clients.pem"
    replace(client_ca, other_authority.cert_pem.bytes())
    client = authority.issue_cert("client")
    files = CertificateFiles(pair.certificate, pair.key, client_ca)
    async with serving(server_credentials(files)) as address:
        assert not await can_ask(address, trusting(authority, client))
        replace(client_ca, authority.cert_pem.bytes())
        assert files.refresh()
        assert await can_ask(address, trusting(authority, client))


def test_a_missing_file_is_named(pair):
    pair.key.unlink()
    with pytest.raises(CertificateError, match=f"cannot read {pair.key}: No such file"):
        server_credentials(CertificateFiles(pair.certificate, pair.key))


def test_a_key_of_another_certificate_is_refused(pair, authority):
    replace(pair.key, authority.issue_cert("127.0.0.1").private_key_pem.bytes())
    with pytest.raises(CertificateError, match="key values mismatch"):
        server_credentials(CertificateFiles(pair.certificate, pair.key))


def test_a_key_behind_a_password_is_refused_without_asking_for_it(pair):
    key = load_pem_private_key(pair.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    replace(pair.key, locked)
    with pytest.raises(CertificateError, match="unencrypted key"):
        server_credentials(CertificateFiles(pair.certificate, pair.key))


def test_an_authority_for_clients_that_is_none_is_refused(pair, tmp_path):
    client_ca = tmp_path / "clients.pem"
    replace(client_ca, b"nonsense")
    with pytest.raises(CertificateError, match="holds no certificates"):
        server_credentials(CertificateFiles(pair.certificate, pair.key, client_ca))
