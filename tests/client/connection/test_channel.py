"""How the connection behaves, seen from the server, and what describes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from google.rpc import code_pb2

from kestrel_client import AsyncClient, Client, ServerError, Unavailable
from kestrel_client._version import VERSION
from kestrel_client.connection.channel import target_of
from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.frontends.grpc.connections.ports import server_credentials
from tests.client import canned
from tests.client.canned import CannedVision
from tests.client.connection.test_diagnosis import serving
from tests.server.certificates import Pair


def test_the_server_learns_which_client_calls(client: Client, vision: CannedVision) -> None:
    client.point(b"picture", "kite")
    assert str(vision.metadata[0]["user-agent"]).startswith(f"kestrel-client/{VERSION} ")


def test_a_call_with_a_large_image_is_repeated_too(client: Client, vision: CannedVision) -> None:
    vision.failures = [canned.status(code_pb2.UNAVAILABLE, "draining")]
    image = bytes(2 * 1024 * 1024)
    assert client.point(image, "kite").points
    assert [len(request.image.data) for request in vision.requests] == [len(image)] * 2


def test_an_answer_larger_than_the_default_limit_arrives(client: Client, vision: CannedVision) -> None:
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
def test_an_address_is_a_host_a_url_or_a_target(address: str, target: str, is_encrypted: bool | None) -> None:
    assert target_of(address) == (target, is_encrypted)


@pytest.mark.parametrize(
    "address",
    [
        "ftp://here",
        "here:port",
        "here:0",
        "here:65536",
        "::1",
        "http://here/v1",
        "a b",
        "user@here:1",
        "a:1,b:2",
    ],
)
def test_what_is_no_address_is_refused_with_what_one_is(address: str) -> None:
    with pytest.raises(ValueError, match="is no address of a server: an address is host:port, host "):
        Client(address)


def test_a_url_without_encryption_does_not_go_with_a_ca() -> None:
    with pytest.raises(ValueError, match="write https://, or name no CA"):
        Client("http://here:1", tls_ca="ca.pem")


async def test_a_ca_comes_from_an_argument_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
