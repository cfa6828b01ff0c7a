"""The command `kestrel-grpc`: parses its arguments and runs one of the commands in `cli/`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

# gRPC's core writes lines in a format of its own to standard error, and reads this variable only while it is being
# imported. Errors of calls are in their statuses; lines about clients are shown where an operator asks for them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from kestrel_grpc import __version__
from kestrel_grpc.cli.ask import add_client_commands
from kestrel_grpc.cli.demo import add_demo_command
from kestrel_grpc.cli.health import add_health_command
from kestrel_grpc.cli.serve import add_serve_command
from kestrel_grpc.cli.token import add_token_command
from kestrel_grpc.cli.verify import add_verify_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    A command imports large libraries when it runs, so that asking a server does not load those of the model.
    """
    parser = argparse.ArgumentParser(
        prog="kestrel-grpc", description="A gRPC inference server for the Moondream vision-language models."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_serve_command(commands)
    add_verify_command(commands)
    add_demo_command(commands)
    add_token_command(commands)
    add_client_commands(commands)
    add_health_command(commands)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
