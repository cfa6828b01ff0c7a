"""The command `kestrel-grpc health`: asks a server whether it takes requests, for containers and scripts.

Uses `grpc.health.v1`, which needs no token.
"""

from __future__ import annotations

import argparse
import os

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_client.connection import ClientTls, why_no_answer
from kestrel_grpc.cli.connection import add_connection_arguments, tls_of
from kestrel_grpc.cli.own_server import OwnServer, own_server
from kestrel_grpc.cli.problems import complain, refuse
from kestrel_grpc.config.options import ConfigurationError


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
        address_help="where the server is (the server that KESTREL_GRPC_… variables of this environment set up)",
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
        complain(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        return 1


def _target(arguments: argparse.Namespace) -> OwnServer:
    tls = tls_of(arguments)
    return own_server(os.environ, tls) if arguments.address is None else OwnServer(arguments.address, tls)


def _ask(target: OwnServer, arguments: argparse.Namespace) -> int:
    with _channel(target.address, target.tls) as channel:
        try:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            response = check(HealthCheckRequest(service=arguments.service), timeout=arguments.timeout)
        except grpc.RpcError as error:
            # The stub raises only calls, which carry a status; the type does not say so.
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            complain(_explain(code, target, arguments.timeout))
            return 1
    print(HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == HealthCheckResponse.SERVING else 1


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, tls.credentials(), tls.channel_options())


def _explain(code: grpc.StatusCode, target: OwnServer, timeout_s: float) -> str:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer from {target.address} within {timeout_s:g} s"
    why = why_no_answer(target.address, target.tls) if code is grpc.StatusCode.UNAVAILABLE else None
    return why or f"{target.address} answers {code.name}"
