"""Implements `kestrel-grpc token new`: prints a new token, and its line for the file of tokens. Calls no server."""

from __future__ import annotations

import argparse
import sys

from kestrel_grpc.access.token_file import Scope, line_for, new_secret
from kestrel_grpc.process.terminal import print_error


def add_token_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    token = subparsers.add_parser("token", help="make a token for callers")
    actions = token.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="print a new token and the line for the file of tokens",
        description="Print a new token, for the caller, and to stderr the line for the file of --tokens.",
    )
    new.add_argument("name", metavar="NAME", help="name of the caller")
    new.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        help="what the token allows; may be repeated (infer and images)",
    )
    new.set_defaults(run=_new)


def _new(arguments: argparse.Namespace) -> int:
    secret = new_secret()
    scopes = frozenset(Scope(word) for word in arguments.scope or ("infer", "images"))
    try:
        line = line_for(arguments.name, secret, scopes)
    except ValueError as error:
        print_error(str(error))
        return 2
    print(secret)
    # On stderr, so that the secret alone can be piped.
    print(f"# The line for the file of --tokens:\n{line}", file=sys.stderr)
    return 0
