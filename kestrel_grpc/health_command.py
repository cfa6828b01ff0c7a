"""The command `kestrel-grpc health`: asks a server whether it takes requests, for containers and scripts.

Speaks `grpc.health.v1` without encryption: where the server's port is encrypted, ask its port for operators.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_client.channel import DEFAULT_ADDRESS


def add_health_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "health",
        help="ask whether a server takes requests",
        description="Print the state of a server, SERVING or another; exit 0 only if it is SERVING.",
    )
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="where the server is (%(default)s)")
    parser.add_argument("--service", default="", help="the service to ask about (all of them)")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="give up then (%(default)g)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with grpc.insecure_channel(arguments.address) as channel:
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
            print(f"kestrel-grpc: {arguments.address} answers {code.name}", file=sys.stderr)
            return 1
    print(HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == HealthCheckResponse.SERVING else 1
