"""The command that containers probe a server with."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from kestrel_client.connection import ClientTls
from kestrel_grpc.__main__ import main
from kestrel_grpc.cli.health import Target, own_server
from kestrel_grpc.config.options import ConfigurationError, ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.engine import EngineStatus
from tests.fakes import FakeEngine
from tests.server.certificates import Pair
from tests.server.serving import Serving, serving


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def address(engine) -> AsyncIterator[str]:
    async with Server(engine, ServerConfig(port=0)) as server:
        yield f"127.0.0.1:{server.port}"


async def health(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["health", *arguments])


async def test_a_server_that_serves_is_healthy(address, capsys):
    assert await health("--address", address) == 0
    assert capsys.readouterr().out.endswith("SERVING\n")


async def test_a_server_that_drains_is_not(address, engine, capsys):
    engine.become(EngineStatus.DRAINING)
    assert await health("--address", address, "--service", "kestrel.v1.VisionService") == 1
    assert capsys.readouterr().out.endswith("NOT_SERVING\n")


async def test_a_missing_server_is_reported_in_one_line(capsys):
    assert await health("--address", "127.0.0.1:9", "--timeout", "5") == 1
    assert capsys.readouterr().err == "kestrel-grpc: no server listens at 127.0.0.1:9: connection refused\n"


async def test_no_answer_in_time_is_told_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts connections, and says nothing on them
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        assert await health("--address", address, "--timeout", "0.05") == 1
    assert capsys.readouterr().err == f"kestrel-grpc: no answer from {address} within 0.05 s\n"


async def test_an_unknown_service_is_told_in_one_line(address, capsys):
    assert await health("--address", address, "--service", "nothing") == 1
    assert capsys.readouterr().err == f"kestrel-grpc: {address} answers NOT_FOUND\n"


class Container:
    """A server with TLS, and the command as its container runs it: in its environment, without arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pair = Pair.within(folder)
        self.authority = trustme.CA()
        self.write_certificate("127.0.0.1")

    def write_certificate(self, *names: str) -> None:
        leaf = self.authority.create_child_ca().issue_cert(*names)
        leaf.private_key_pem.write_to_path(str(self.pair.key))
        self.pair.certificate.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))

    @property
    def options(self) -> dict[str, Any]:
        return {"tls_certificate": str(self.pair.certificate), "tls_key": str(self.pair.key)}

    async def probe(self, rig: Serving, *arguments: str, **more: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        variables = {f"KESTREL_GRPC_{name.upper()}": value for name, value in {**self.options, **more}.items()}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "kestrel_grpc", "health", *arguments],
            env={
                **os.environ,
                "KESTREL_GRPC_HOST": "0.0.0.0",
                "KESTREL_GRPC_PORT": str(rig.server.port),
                **variables,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


@pytest.mark.parametrize("names", [["127.0.0.1"], ["kestrel.example.com", "10.0.0.1"], ["*.example.com"]])
async def test_a_container_with_tls_finds_itself_healthy_whatever_its_certificate_is_for(container, names):
    container.write_certificate(*names)
    async with serving(**container.options) as rig:
        assert await container.probe(rig) == (0, "SERVING\n", "")


async def test_a_container_that_shows_another_certificate_than_its_own_is_not_healthy(container, tmp_path):
    (tmp_path / "other").mkdir()
    async with serving(**Container(tmp_path / "other").options) as rig:
        status, printed, complaint = await container.probe(rig)
    assert (status, printed) == (1, "")
    assert complaint.startswith(f"kestrel-grpc: the certificate of 127.0.0.1:{rig.server.port} is not trusted: ")
    assert complaint.count("\n") == 1


async def test_a_container_that_asks_clients_for_certificates_is_probed_with_one(container, tmp_path):
    clients = trustme.CA()
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    leaf = clients.issue_cert("probe")
    leaf.private_key_pem.write_to_path(str(tmp_path / "probe.key"))
    leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "probe.pem"))
    container_options: dict[str, Any] = {**container.options, "tls_client_ca": str(tmp_path / "clients.pem")}
    files = {"tls_client_certificate": str(tmp_path / "probe.pem"), "tls_client_key": str(tmp_path / "probe.key")}
    async with serving(**container_options) as rig:
        assert await container.probe(rig, **files) == (0, "SERVING\n", "")
        status, _, complaint = await container.probe(rig)
    assert status == 1
    assert "give tls_client_certificate and tls_client_key" in complaint
    assert complaint.count("\n") == 1


async def test_a_server_elsewhere_is_asked_with_the_authority_given(container, tmp_path):
    container.authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with serving(**container.options) as rig:
        status = await health("--address", rig.address, "--tls-ca", str(tmp_path / "ca.pem"))
        assert status == 0


async def test_a_file_or_variable_that_is_wrong_is_told_in_one_line(address, tmp_path, capsys, monkeypatch):
    missing = tmp_path / "missing.pem"
    assert await health("--address", address, "--tls-ca", str(missing)) == 1
    assert capsys.readouterr().err == f"kestrel-grpc: {missing}: No such file or directory\n"
    assert await health("--address", address, "--tls-client-key", "a.key") == 1
    assert "each needs the other" in capsys.readouterr().err
    monkeypatch.setenv("KESTREL_GRPC_TOKNES", "1")
    assert await health() == 2
    assert "KESTREL_GRPC_TOKNES" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "127.0.0.1:50051"),
        ({"KESTREL_GRPC_PORT": "7000"}, "127.0.0.1:7000"),
        ({"KESTREL_GRPC_HOST": "0.0.0.0"}, "127.0.0.1:50051"),
        ({"KESTREL_GRPC_HOST": "::"}, "[::1]:50051"),
        ({"KESTREL_GRPC_HOST": "10.0.0.7"}, "10.0.0.7:50051"),
        ({"KESTREL_GRPC_HOST": "kestrel.internal"}, "kestrel.internal:50051"),
        ({"KESTREL_GRPC_ADMIN_PORT": "7001", "KESTREL_GRPC_ADMIN_HOST": "::1"}, "[::1]:7001"),
        ({"KESTREL_GRPC_UNIX_SOCKET": "/run/kestrel", "KESTREL_GRPC_ADMIN_PORT": "7001"}, "unix:/run/kestrel"),
    ],
)
def test_an_unencrypted_listener_is_where_the_variables_say(environment, address):
    assert own_server(environment) == Target(address, None)


@pytest.mark.parametrize(
    "listener", [{"KESTREL_GRPC_ADMIN_PORT": "7001"}, {"KESTREL_GRPC_UNIX_SOCKET": "/run/kestrel"}]
)
def test_an_unencrypted_listener_is_preferred_to_an_encrypted_one(listener):
    tls = {
        "KESTREL_GRPC_TLS_CERTIFICATE": "a.pem",
        "KESTREL_GRPC_TLS_KEY": "a.key",
        "KESTREL_GRPC_TLS_CLIENT_CA": "b.pem",
    }
    assert own_server({**tls, **listener}).tls is None


def test_authorities_that_are_given_are_asked_for_instead_of_the_servers_certificate():
    given = ClientTls(Path("ca.pem"), None, None)
    environment = {"KESTREL_GRPC_TLS_CERTIFICATE": "a.pem", "KESTREL_GRPC_TLS_KEY": "a.key"}
    assert own_server(environment, given) == Target("127.0.0.1:50051", given)


def test_a_certificate_alone_identifies_the_server_on_the_local_host():
    environment = {
        "KESTREL_GRPC_PORT": "9",
        "KESTREL_GRPC_TLS_CERTIFICATE": "a.pem",
        "KESTREL_GRPC_TLS_KEY": "a.key",
    }
    assert own_server(environment) == Target("127.0.0.1:9", ClientTls(Path("a.pem"), None, None))


def test_a_port_that_only_the_server_knows_has_to_be_given():
    with pytest.raises(ConfigurationError, match=r"KESTREL_GRPC_PORT: .* --address"):
        own_server({"KESTREL_GRPC_PORT": "0"})


def test_variables_that_the_server_would_refuse_are_refused():
    with pytest.raises(ConfigurationError, match="KESTREL_GRPC_TOKNES"):
        own_server({"KESTREL_GRPC_TOKNES": "1"})


async def test_the_address_of_the_environment_is_asked(address, monkeypatch, capsys):
    monkeypatch.setenv("KESTREL_GRPC_PORT", "9")
    for given in (address, f"http://{address}"):
        monkeypatch.setenv("KESTREL_GRPC_ADDRESS", given)
        assert await health() == 0
    assert await health("--address", "127.0.0.1:9") == 1
    assert capsys.readouterr().out == "SERVING\nSERVING\n"


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_this_machine_is_probed_without_the_proxy(address, variable, monkeypatch, capsys):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert await health("--address", address) == 0
    monkeypatch.setenv("KESTREL_GRPC_PORT", address.rpartition(":")[2])
    assert await health() == 0
    assert capsys.readouterr().out == "SERVING\nSERVING\n"


async def test_an_address_that_is_none_is_refused(capsys):
    assert await health("--address", "http://") == 1
    assert "is no address of a server" in capsys.readouterr().err
