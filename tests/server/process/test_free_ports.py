import asyncio
import os
import socket
import stat
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kestrel_client import AsyncClient, PermissionDenied, Unauthenticated
from kestrel_client.v1 import engine_service_pb2 as engine_wire
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.__main__ import main
from kestrel_grpc.access.tls import CertificateError
from kestrel_grpc.access.token_file import Scope, TokenFileError, hash_of, line_for, read_tokens
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.process.free_ports import PortUnavailable, require_free_socket
from kestrel_grpc.requirements import require_usable
from kestrel_grpc.server import Server
from tests.fakes import FakeEngine
from tests.server.certificates import Pair, trusting
from tests.server.serving import reason_of, serving

QUERY = wire.CompleteQueryRequest(question="?")
LOAD = engine_wire.GetLoadRequest()


async def ask(channel: grpc.aio.Channel, **options: Any) -> str:
    stub: Any = VisionServiceStub(channel)
    return (await stub.CompleteQuery(QUERY, timeout=60, **options)).result.answer


async def load(channel: grpc.aio.Channel, **options: Any) -> int:
    stub: Any = EngineServiceStub(channel)
    return (await stub.GetLoad(LOAD, timeout=60, **options)).load.page_count


async def is_healthy(channel: grpc.aio.Channel) -> bool:
    stub: Any = HealthStub(channel)
    answer = await stub.Check(HealthCheckRequest(), timeout=60)
    return answer.status == HealthCheckResponse.SERVING


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_server_with_a_certificate_speaks_only_encrypted(tmp_path):
    authority, pair = trustme.CA(), Pair.within(tmp_path)
    pair.write(authority)
    async with serving(tls_certificate=str(pair.certificate), tls_key=str(pair.key)) as rig:
        async with grpc.aio.secure_channel(rig.address, trusting(authority)) as channel:
            assert await ask(channel) == "a kestrel"
            assert await is_healthy(channel)
        error = await refusal(ask(rig.channel))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_may_ask_for_certificates_of_its_clients(tmp_path):
    authority, pair = trustme.CA(), Pair.within(tmp_path)
    pair.write(authority)
    client_ca = tmp_path / "clients.pem"
    authority.cert_pem.write_to_path(str(client_ca))
    files: dict[str, Any] = {
        "tls_certificate": str(pair.certificate),
        "tls_key": str(pair.key),
        "tls_client_ca": str(client_ca),
    }
    async with serving(**files) as rig:
        known = trusting(authority, authority.issue_cert("client"))
        async with grpc.aio.secure_channel(rig.address, known) as channel:
            assert await ask(channel) == "a kestrel"
        async with grpc.aio.secure_channel(rig.address, trusting(authority)) as channel:
            assert (await refusal(ask(channel))).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_socket_serves_its_owner_and_its_group_and_goes_with_the_server(tmp_path):
    path = tmp_path / "kestrel.sock"
    async with serving(unix_socket=str(path)) as rig:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            assert await ask(channel) == "a kestrel"
            assert await load(channel) == 500
        assert await ask(rig.channel) == "a kestrel"
    assert not path.exists()


async def test_a_socket_asks_for_tokens_like_the_port(tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(line_for("alice", "secret", frozenset({Scope.INFER})))
    async with (
        serving(unix_socket=str(tmp_path / "s"), tokens=str(tokens)),
        grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel,
    ):
        assert reason_of(await refusal(ask(channel))) == "TOKEN_INVALID"


async def test_the_socket_of_a_server_that_runs_is_not_taken(tmp_path):
    path = tmp_path / "kestrel.sock"
    config = ServerConfig(port=0, unix_socket=str(path))
    async with serving(unix_socket=str(path)):
        with pytest.raises(PortUnavailable, match="another server does"):
            require_usable(config)
        with pytest.raises(PortUnavailable, match="another server does"):
            await Server(FakeEngine(), config).start()
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            assert await ask(channel) == "a kestrel"


async def test_the_socket_of_a_server_that_died_is_taken_over(tmp_path):
    path = tmp_path / "kestrel.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with (
        serving(unix_socket=str(path)),
        grpc.aio.insecure_channel(f"unix:{path}") as channel,
    ):
        assert await ask(channel) == "a kestrel"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_path_where_no_socket_can_be_is_told(tmp_path, is_there):
    path = tmp_path / "file" if is_there else tmp_path / "folder" / "socket"
    if is_there:
        path.write_text("precious")
    config = ServerConfig(port=0, unix_socket=str(path))
    with pytest.raises(PortUnavailable, match="not a socket" if is_there else "there is no folder"):
        require_usable(config)
    assert path.exists() is is_there


async def test_operators_may_have_a_port_of_their_own(tmp_path):
    async with (
        serving(admin_port=0) as rig,
        grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.admin_port}") as operators,
    ):
        assert rig.server.admin_port not in (None, 0, rig.server.port)
        assert await load(operators) == 500
        assert await ask(rig.channel) == "a kestrel"
        for call in (load(rig.channel), ask(operators)):
            assert (await refusal(call)).code() is grpc.StatusCode.UNIMPLEMENTED
        assert await is_healthy(operators)
        assert await is_healthy(rig.channel)


async def test_without_a_port_of_their_own_operators_use_that_of_all():
    async with serving() as rig:
        assert rig.server.admin_port is None
        assert await load(rig.channel) == 500


async def test_the_port_for_operators_is_not_encrypted_and_asks_for_tokens(tmp_path):
    pair, tokens = Pair.within(tmp_path), tmp_path / "tokens.toml"
    pair.write(trustme.CA())
    tokens.write_text(line_for("operator", "secret", frozenset({Scope.ADMIN})))
    files: dict[str, Any] = {
        "tls_certificate": str(pair.certificate),
        "tls_key": str(pair.key),
        "tokens": str(tokens),
    }
    async with (
        serving(admin_port=0, **files) as rig,
        grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.admin_port}") as operators,
    ):
        assert await load(operators, metadata=(("authorization", "Bearer secret"),)) == 500
        assert reason_of(await refusal(load(operators))) == "TOKEN_INVALID"
        assert await is_healthy(operators)


def test_files_that_cannot_be_used_are_told_before_a_model_is_loaded(tmp_path: Path):
    missing = str(tmp_path / "missing")
    with pytest.raises(TokenFileError, match="cannot read"):
        require_usable(ServerConfig(port=0, tokens=missing))
    with pytest.raises(CertificateError, match="cannot read"):
        require_usable(ServerConfig(port=0, tls_certificate=missing, tls_key=missing))


async def test_a_port_of_operators_that_is_taken_is_told():
    async with serving() as rig:
        with pytest.raises(PortUnavailable, match="Address already in use"):
            require_usable(ServerConfig(port=0, admin_port=rig.server.port))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A certificate and a token, as a server takes them; the authority of the former lies beside it."""
    authority, pair, tokens = trustme.CA(), Pair.within(tmp_path), tmp_path / "tokens.toml"
    pair.write(authority)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tokens.write_text(line_for("alice", "secret", frozenset({Scope.INFER})))
    return {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key), "tokens": str(tokens)}


async def test_the_client_brings_a_token_over_an_encrypted_connection(files, tmp_path):
    credentials = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    async with serving(**files) as rig:
        async with AsyncClient(rig.address, token="secret", credentials=credentials) as client:
            assert (await client.complete_query(None, "?")).answer == "a kestrel"
            with pytest.raises(PermissionDenied, match="needs the scope admin"):
                await client.load()
        async with AsyncClient(rig.address, credentials=credentials) as client:
            with pytest.raises(Unauthenticated):
                await client.complete_query(None, "?")
            with pytest.raises(Unauthenticated):
                await client.query(None, "?").result()


async def ask_on_the_command_line(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kestrel-grpc query`, in a thread of this process."""
    command = ["query", "-", "?", "--address", address, *arguments]
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as complained:
        status = await asyncio.to_thread(main, command)
    return subprocess.CompletedProcess(command, status, printed.getvalue(), complained.getvalue())


async def test_the_command_line_brings_a_token_over_an_encrypted_connection(files, tmp_path, monkeypatch):
    authority = str(tmp_path / "ca.pem")
    async with serving(**files) as rig:
        by_flag = await ask_on_the_command_line(rig.address, "--token", "secret", "--tls-ca", authority)
        without = await ask_on_the_command_line(rig.address, "--tls-ca", authority)
        wrong_token = await ask_on_the_command_line(rig.address, "--tls-ca", authority, "--token", "wrong")
        monkeypatch.setenv("KESTREL_GRPC_TOKEN", "secret")
        monkeypatch.setenv("KESTREL_GRPC_TLS_CA", authority)
        by_environment = await ask_on_the_command_line(rig.address)
    assert (by_flag.stdout, by_flag.stderr) == ("a kestrel\n", "")
    assert by_environment.stdout == "a kestrel\n"
    assert without.returncode == 1
    assert "give token, --token or KESTREL_GRPC_TOKEN" in without.stderr
    assert "does not know the token" in wrong_token.stderr


async def test_the_command_line_says_in_one_line_what_is_wrong_with_the_encryption(files, tmp_path):
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    async with serving(**files) as rig:
        plain = await ask_on_the_command_line(rig.address)
        untrusted = await ask_on_the_command_line(rig.address, "--tls-ca", str(stranger))
        # In processes of their own: gRPC reads the variable while it is imported.
        query = [sys.executable, "-m", "kestrel_grpc", "query", "-", "?", "--address", rig.address]
        query += ["--tls-ca", str(stranger)]
        environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        told_little, told_more = [
            await asyncio.to_thread(subprocess.run, query, capture_output=True, text=True, env=environment | more)
            for more in ({}, {"GRPC_VERBOSITY": "INFO"})
        ]
    async with serving() as rig:
        encrypted = await ask_on_the_command_line(rig.address, "--tls-ca", str(stranger))
        address = rig.address
    assert "speaks TLS only; give its CA by tls_ca, --tls-ca" in plain.stderr
    assert "is not trusted: " in untrusted.stderr
    assert (
        encrypted.stderr
        == f"kestrel-grpc: {address} speaks no TLS; leave out https://, tls_ca, --tls-ca and KESTREL_GRPC_TLS_CA\n"
    )
    assert told_little.stderr == untrusted.stderr
    for done in (plain, untrusted, encrypted, told_little):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Handshake failed" in told_more.stderr, "lines of gRPC's core are there for whoever asks for them"


async def test_the_command_line_shows_a_certificate_to_a_server_that_asks_for_one(files, tmp_path):
    clients, authority = trustme.CA(), str(tmp_path / "ca.pem")
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    leaf = clients.issue_cert("someone")
    certificate, key = str(tmp_path / "client.pem"), str(tmp_path / "client.key")
    leaf.cert_chain_pems[0].write_to_path(certificate)
    leaf.private_key_pem.write_to_path(key)
    connection = ("--token", "secret", "--tls-ca", authority)
    async with serving(**files, tls_client_ca=str(tmp_path / "clients.pem")) as rig:
        with_it = await ask_on_the_command_line(
            rig.address, *connection, "--tls-client-certificate", certificate, "--tls-client-key", key
        )
        without = await ask_on_the_command_line(rig.address, *connection)
    assert (with_it.stdout, with_it.stderr) == ("a kestrel\n", "")
    assert "give tls_client_certificate and tls_client_key" in without.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: anybody could call"),
        (["--tokens", "missing.toml"], "cannot read missing.toml"),
        (["--tls-certificate", "missing.pem", "--tls-key", "missing.key"], "cannot read missing"),
        (["--prot", "1"], "--prot"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_line_and_with_status_two(arguments, problem, capsys):
    assert main(["serve", "--model", "x", "--port", "0", *arguments]) == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


def test_a_token_is_made_on_the_command_line(tmp_path, capsys):
    command = ["token", "new"]
    assert main([*command, "alice", "--scope", "admin", "--scope", "infer", "--scope", "images"]) == 0
    made = capsys.readouterr()
    (tmp_path / "tokens.toml").write_text(made.err)
    (token,) = read_tokens(tmp_path / "tokens.toml").values()
    assert (token.name, token.scopes) == ("alice", frozenset(Scope))
    assert hash_of(made.out.strip()) == token.sha256
    assert main([*command, "a b"]) == 2


def test_a_link_to_nothing_is_no_place_for_a_socket(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(PortUnavailable, match="it is a link to nothing"):
        require_free_socket(tmp_path / "link")
