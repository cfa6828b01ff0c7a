"""Where a command beside the server finds it, from the same environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_client.connection import ClientTls
from kestrel_grpc.cli.own_server import OwnServer, own_server
from kestrel_grpc.config.options import ConfigurationError


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
    assert own_server(environment) == OwnServer(address, None)


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
    assert own_server(environment, given) == OwnServer("127.0.0.1:50051", given)


def test_a_certificate_alone_identifies_the_server_on_the_local_host():
    environment = {
        "KESTREL_GRPC_PORT": "9",
        "KESTREL_GRPC_TLS_CERTIFICATE": "a.pem",
        "KESTREL_GRPC_TLS_KEY": "a.key",
    }
    assert own_server(environment) == OwnServer("127.0.0.1:9", ClientTls(Path("a.pem"), None, None))


def test_a_port_that_only_the_server_knows_has_to_be_given():
    with pytest.raises(ConfigurationError, match=r"KESTREL_GRPC_PORT: .* --address"):
        own_server({"KESTREL_GRPC_PORT": "0"})


def test_variables_that_the_server_would_refuse_are_refused():
    with pytest.raises(ConfigurationError, match="KESTREL_GRPC_TOKNES"):
        own_server({"KESTREL_GRPC_TOKNES": "1"})
