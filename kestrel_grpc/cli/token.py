"""Implements `kestrel-grpc token`: makes, lists and revokes the tokens of a file. Calls no server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from kestrel_grpc.access.token_edits import MODE, add_token, remove_token
from kestrel_grpc.access.token_file import Scope, Token, TokenFileError, line_for, new_secret, read_tokens
from kestrel_grpc.cli.common import print_table, show_json
from kestrel_grpc.process.terminal import print_error

_NOTHING = "-"


def add_token_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    summary = "make, list and revoke tokens of callers"
    token = subparsers.add_parser("token", help=summary, description=f"{summary.capitalize()}.")
    actions = token.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="print a new token, and add it to the file of tokens",
        description="Print a new token, for the caller. Its line, which holds only a hash, is added to FILE, or "
        "printed to stderr.",
    )
    new.add_argument("name", metavar="NAME", help="name of the caller")
    new.add_argument("--file", metavar="FILE", type=Path, help="the file of --tokens; it is made if it is missing")
    new.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        help="what the token allows; may be repeated (infer and images)",
    )
    new.add_argument(
        "--expires",
        metavar="DATE",
        type=_moment,
        help="when it stops to be valid: a date (from 00:00 UTC), or a time such as 2027-01-31T12:00:00Z (never)",
    )
    listed = _action(actions, "list", "show the tokens of a file, without their secrets", _list)
    listed.add_argument("--json", action="store_true", help="print JSON instead of a table")
    revoke = _action(actions, "revoke", "remove a token from a file; its calls end within a second", _revoke)
    revoke.add_argument("name", metavar="NAME", help="name of the caller")
    new.set_defaults(run=_new)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
    parser.add_argument("--file", metavar="FILE", type=Path, required=True, help="the file of --tokens")
    parser.set_defaults(run=run)
    return parser


def _moment(text: str) -> date | datetime:
    """Returns a date, or a time with its offset, that has not passed."""
    try:
        found: date | datetime = date.fromisoformat(text)
        begins = datetime(found.year, found.month, found.day, tzinfo=UTC)
    except ValueError:
        try:
            found = begins = datetime.fromisoformat(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no date such as 2027-01-31") from None
    if begins.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no offset; in UTC it is {text}Z")
    if begins <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text!r} has passed")
    return found


def _new(arguments: argparse.Namespace) -> int:
    secret = new_secret()
    scopes = frozenset(Scope(word) for word in arguments.scope or ("infer", "images"))
    try:
        line = line_for(arguments.name, secret, scopes, arguments.expires)
    except ValueError as error:
        print_error(str(error))
        return 2
    path: Path | None = arguments.file
    if path is None:
        print(secret)
        # On stderr, so that the secret alone can be piped.
        print(f"# The line for the file of --tokens:\n{line}", file=sys.stderr)
        return 0
    status = _changed(path, lambda: add_token(path, arguments.name, line))
    if status == 0:
        print(secret)
        print(f"{arguments.name} is in {path}; this token is shown only once", file=sys.stderr)
    return status


def _list(arguments: argparse.Namespace) -> int:
    try:
        tokens = read_tokens(arguments.file)
    except TokenFileError as error:
        print_error(str(error))
        return 1
    if arguments.json:
        show_json([_facts(token) for token in tokens.values()])
        return 0
    columns = ("token", "scopes", "rate", "concurrency", "namespace", "max priority", "expires", "valid")
    print_table(columns, (tuple(map(_cell, _facts(token).values())) for token in tokens.values()))
    return 0


def _facts(token: Token) -> dict[str, Any]:
    limit, expires = token.limit, token.expires_at
    until = None if expires is None else expires.isoformat(timespec="seconds")
    return {
        "token": token.name,
        "scopes": [scope.value for scope in Scope if scope in token.scopes],
        "rate": None if limit is None else limit.rate,
        "concurrency": None if limit is None else limit.concurrency,
        "namespace": token.shared_namespace,
        "max_priority": token.max_priority.name.lower(),
        "expires": until,
        "is_valid": expires is None or expires > datetime.now(UTC),
    }


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _NOTHING if value is None else ", ".join(value) if isinstance(value, list) else str(value)


def _revoke(arguments: argparse.Namespace) -> int:
    status = _changed(arguments.file, lambda: remove_token(arguments.file, arguments.name))
    if status == 0:
        print(f"{arguments.name} is no longer in {arguments.file}", file=sys.stderr)
    return status


def _changed(path: Path, change: Callable[[], int | None]) -> int:
    """Changes a file of tokens; returns the exit status."""
    try:
        former = change()
    except TokenFileError as error:
        print_error(str(error))
        return 1
    if former is not None:
        print_error(f"{path} had the mode {former:04o}, and has {MODE:04o} now: only its owner reads it")
    return 0
