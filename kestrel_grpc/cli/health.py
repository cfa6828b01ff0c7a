"""Implements `kestrel-grpc health`: asks a server whether it takes requests, for containers and scripts.

Uses `grpc.health.v1`, which needs no token. Without an address, by `--address` or `KESTREL_GRPC_ADDRESS`, it asks
the server that the other environment variables configure.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel_grpc.cli.common import add_connection_arguments, refuse, tls_of
from kestrel_grpc.config.options import ConfigurationError, ServerConfig
from kestrel_grpc.process.free_ports import address_of
from kestrel_grpc.process.terminal import print_error

# `--help` needs no gRPC: what uses it imports it when it runs.
if TYPE_CHECKING:
    import grpc

    from kestrel_client.connection import ClientTls

_CONNECT_TIMEOUT_S = 2.0


def add_health_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "health",
        help="ask whether a server takes requests",
        description="Print the state of a server, SERVING or another; exit 0 only if it is SERVING.",
    )
    add_connection_arguments(
        parser,
        address=None,
        address_help="where the server is (KESTREL_GRPC_ADDRESS, else the server that KESTREL_GRPC_… variables of "
        "this environment set up)",
        timeout_s=5.0,
    )
    parser.add_argument("--service", default="", help="the service to ask about (all of them)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        target = _target(arguments)
        return _ask(target, arguments)
    except ConfigurationError as error:
        return refuse(error)
    except (OSError, ValueError) as error:
        print_error(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        return 1


def _target(arguments: argparse.Namespace) -> Target:
    from kestrel_client.connection import ADDRESS_VARIABLE, Connection

    tls = tls_of(arguments)
    given = arguments.address or os.environ.get(ADDRESS_VARIABLE)
    if not given:
        return own_server(os.environ, tls)
    files = (arguments.tls_ca, arguments.tls_client_certificate, arguments.tls_client_key)
    connection = Connection.to(given, token="", tls=files, credentials=None, max_retries=0)
    return Target(connection.target, connection.tls)


def _ask(target: Target, arguments: argparse.Namespace) -> int:
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    with _channel(target.address, target.tls) as channel:
        try:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            response = check(HealthCheckRequest(service=arguments.service), timeout=arguments.timeout)
        except grpc.RpcError as error:
            # The stub raises calls only, which have a status; its type is wider.
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            print_error(_explain(code, target, arguments.timeout))
            return 1
    print(HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == HealthCheckResponse.SERVING else 1


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    import grpc

    from kestrel_client.this_machine import proxy_options

    if tls is None:
        return grpc.insecure_channel(address, proxy_options(address))
    return grpc.secure_channel(address, tls.credentials(), (*tls.channel_options(), *proxy_options(address)))


def _explain(code: grpc.StatusCode, target: Target, timeout_s: float) -> str:
    import grpc

    from kestrel_client.connection import why_no_answer

    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer from {target.address} within {timeout_s:g} s"
    why = why_no_answer(target.address, target.tls) if code is grpc.StatusCode.UNAVAILABLE else None
    return why or f"{target.address} answers {code.name}"


@dataclass(frozen=True, slots=True)
class Target:
    """Holds an address and its TLS settings; `tls` None means without encryption."""

    address: str
    tls: ClientTls | None


def own_server(environment: Mapping[str, str], given: ClientTls | None = None) -> Target:
    """Returns the server's Unix socket or admin port if it has one, since neither is encrypted; else its port.

    On an encrypted port the server's own certificate is trusted, whatever name is in it, unless `given` names
    others. Raises `ConfigurationError`.
    """
    from kestrel_client.connection import ClientTls

    # Whether others may reach the server is checked where it starts; a flag may have allowed it there.
    config = ServerConfig.parse({"insecure_public": "on"}, environment)
    if config.unix_socket is not None:
        return Target(f"unix:{config.unix_socket}", None)
    if config.admin_port is not None:
        return Target(_reachable(config.admin_host, config.admin_port, "KESTREL_GRPC_ADMIN_PORT"), None)
    address = _reachable(config.host, config.port, "KESTREL_GRPC_PORT")
    if config.tls_certificate is None or (given is not None and given.ca is not None):
        return Target(address, given)
    certificate = Path(config.tls_certificate)
    files = (None, None) if given is None else (given.certificate, given.key)
    return Target(address, ClientTls(certificate, *files, server_name=_name_in(certificate, address)))


def _reachable(host: str, port: int, variable: str) -> str:
    if port == 0:
        raise ConfigurationError((f"{variable}: the server takes any free port; say which with --address",))
    try:
        listened = ipaddress.ip_address(host)
    except ValueError:
        return address_of(host, port)
    if listened.is_unspecified:
        host = "127.0.0.1" if listened.version == 4 else "::1"
    return address_of(host, port)


def _name_in(certificate: Path, address: str) -> str | None:
    """Returns a name in the certificate of the server; None if it has no trusted certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate is verified, but not its host name, which this function reads.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    host, _, port = address.rpartition(":")
    try:
        context.load_verify_locations(certificate)
        with (
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S) as connection,
            context.wrap_socket(connection) as encrypted,
        ):
            shown = encrypted.getpeercert() or {}
    except OSError:  # the call itself then fails as well, and reports why
        return None
    names = [str(name) for kind, name in shown.get("subjectAltName", ()) if kind in {"DNS", "IP Address"}]
    return re.sub(r"^\*\.", "any.", names[0]) if names else None
