"""Reports mistakes and connects to servers, for all commands."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from kestrel_grpc.config.options import ConfigurationError
from kestrel_grpc.config.sources import environment_name
from kestrel_grpc.process.terminal import print_error, printable, printable_json

# The client imports gRPC, which no help needs: what uses it imports it when it runs.
if TYPE_CHECKING:
    from kestrel_client import Client
    from kestrel_client.connection import ClientTls

_ENGINE_PACKAGES = ("torch", "tokenizers", "safetensors", "llguidance", "huggingface_hub")
"""The packages of the extra `server`, without which no model is loaded."""

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_S = 120.0
"""Both are the defaults of the client."""

Command = Callable[["Client", argparse.Namespace], int | None]
"""Runs with a client; returns the exit status, None for 0."""
Flags = argparse.ArgumentParser | argparse._ArgumentGroup
"""The types to which flags are added."""
PICTURE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))
"""The endings of the names of image files, in a folder, in lower case."""


class EngineNotInstalled(Exception):
    """A command needs the engine, whose libraries are not installed; the text says how to install them."""


def require_engine() -> None:
    """Raises `EngineNotInstalled` if a library that loads and runs models is missing. Imports none of them."""
    missing = [name for name in _ENGINE_PACKAGES if find_spec(name) is None]
    if missing:
        raise EngineNotInstalled(
            f"this command loads a model, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install 'kestrel-grpc[server]', or 'kestrel-grpc[gpu]' for an NVIDIA GPU"
        )


def refuse(error: ConfigurationError) -> int:
    """Prints a line for each problem; returns the exit status."""
    for problem in error.problems:
        print_error(problem)
    return 2


def show(*texts: object, end: str = "\n", file: TextIO | None = None) -> None:
    """Prints a server's text, such as names and answers, without its control characters, at once."""
    print(*(printable(str(text)) for text in texts), sep="\n", end=end, file=file, flush=True)


def show_json(value: Any) -> None:
    """Prints a value as a line of JSON, control characters as escapes."""
    print(printable_json(json.dumps(value, ensure_ascii=False, default=str)), flush=True)


def print_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Prints a table; nothing without rows."""
    table = [columns, *rows]
    if len(table) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        show("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `run_with_client` reads."""
    add_connection_arguments(
        parser,
        address=os.environ.get("KESTREL_GRPC_ADDRESS") or DEFAULT_ADDRESS,
        address_help="where the server is (%(default)s; KESTREL_GRPC_ADDRESS sets another default)",
        timeout_s=DEFAULT_TIMEOUT_S,
    )
    add_token_argument(parser)


def add_token_argument(parser: Flags) -> None:
    """Adds the flag of the token."""
    parser.add_argument(
        "--token",
        default=os.environ.get("KESTREL_GRPC_TOKEN") or None,
        help="API token, for servers that require one (KESTREL_GRPC_TOKEN, which other users here cannot see)",
    )


def run_with_client(command: Command, arguments: argparse.Namespace) -> int:
    """Runs a command with a client of the server that the flags name; returns the exit status."""
    from kestrel_client import Client, KestrelClientError

    try:
        with Client(
            arguments.address,
            timeout_s=arguments.timeout,
            token=arguments.token,
            tls_ca=arguments.tls_ca,
            tls_client_certificate=arguments.tls_client_certificate,
            tls_client_key=arguments.tls_client_key,
        ) as client:
            return command(client, arguments) or 0
    except BrokenPipeError:
        # The reader of stdout has closed it; without this, Python reports another error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KestrelClientError, OSError, ValueError) as error:  # such as a number that is too large for its field
        print_error(explain(error))
        return 1
    except KeyboardInterrupt:
        return 130


def explain(error: Exception) -> str:
    """Returns one line that describes an error and, if known, its remedy."""
    from kestrel_client import ServerError

    if isinstance(error, ServerError) and error.request_id:
        return f"{error} (see request {error.request_id} in the log of the server)"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def add_connection_arguments(parser: Flags, *, address: str | None, address_help: str, timeout_s: float) -> None:
    """Adds the flags of a connection. `address` None leaves the default to the command."""
    parser.add_argument("--address", default=address, help=address_help)
    _add_file(parser, "ca", "connect with TLS to a server whose certificate is signed by one in this file")
    _add_file(parser, "client-certificate", "client certificate, for servers that ask for one, in PEM")
    _add_file(parser, "client-key", "the key of that certificate, in PEM")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=timeout_s, help="longest time for a call (%(default)g)"
    )


def tls_of(arguments: argparse.Namespace) -> ClientTls | None:
    """Returns the TLS settings of the flags and their variables; None without any. Raises `ValueError`."""
    from kestrel_client.connection import ClientTls

    return ClientTls.named(arguments.tls_ca, arguments.tls_client_certificate, arguments.tls_client_key)


def _add_file(parser: Flags, name: str, help: str) -> None:
    variable = environment_name(f"tls_{name.replace('-', '_')}")
    parser.add_argument(
        f"--tls-{name}",
        metavar="FILE",
        help=f"{help} ({variable})",
    )
