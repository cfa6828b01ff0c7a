"""The flags of connections to a server: address, timeout, TLS. Opens no connection."""

from __future__ import annotations

import argparse
import os

from kestrel_client.connection import ClientTls
from kestrel_grpc.config.sources import CLIENT_VARIABLES, environment_name, former_variables


def add_connection_arguments(
    parser: argparse.ArgumentParser, *, address: str | None, address_help: str, timeout_s: float
) -> None:
    """Add the flags. `address` None leaves the choice of a default to the command."""
    parser.add_argument("--address", default=address, help=address_help)
    _add_file(parser, "ca", "connect with TLS to a server whose certificate is signed by one in this file")
    _add_file(parser, "client-certificate", "client certificate, for servers that ask for one, in PEM")
    _add_file(parser, "client-key", "the key of that certificate, in PEM")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=timeout_s, help="timeout (%(default)g)")


def tls_of(arguments: argparse.Namespace) -> ClientTls | None:
    """TLS as the flags configure it; None where it is off. Raises `ValueError`.

    Raises it too where a variable of the client commands has its former name: without that variable, a token could
    be sent without encryption.
    """
    for problem in former_variables(CLIENT_VARIABLES, os.environ):
        raise ValueError(problem)
    return ClientTls.named(arguments.tls_ca, arguments.tls_client_certificate, arguments.tls_client_key)


def _add_file(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    variable = environment_name(f"tls_{name.replace('-', '_')}")
    parser.add_argument(
        f"--tls-{name}",
        metavar="FILE",
        help=f"{help} ({variable})",
    )
