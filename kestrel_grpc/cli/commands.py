"""Parses the arguments of all commands, runs the command, and suggests a correction of a mistyped word."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from kestrel_grpc import __version__
from kestrel_grpc.cli.common import EngineNotInstalled
from kestrel_grpc.cli.serve import add_serve_command
from kestrel_grpc.process.terminal import print_error, printable
from kestrel_runtime.api.errors import did_you_mean

_MISUSED = 2


def run(words: Sequence[str]) -> int:
    """Runs one command; returns the exit status.

    A command imports large libraries when it runs, so that asking a server does not load those of the model.
    """
    parser: argparse.ArgumentParser = _Parser(
        prog="kestrel-grpc", description="A gRPC inference server for the Moondream vision-language models."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    add_serve_command(commands)
    if "_ARGCOMPLETE" in os.environ or not words or words[0] not in commands.choices:
        for add in _other_commands():
            add(commands)
    if "_ARGCOMPLETE" in os.environ:
        from kestrel_grpc.cli.completion import complete

        complete(parser)
    if not words:
        parser.print_help()
        return 0
    if not words[0].startswith("-") and words[0] not in commands.choices:
        print_error(f"{words[0]}: is no command{did_you_mean(words[0], commands.choices)}")
        return _MISUSED
    asking = commands.choices.get(words[0])
    if asking is not None and asking.get_default("skill") is not None:
        # Several images may stand before the question, and options anywhere among them.
        arguments, unknown = asking.parse_known_intermixed_args(words[1:])
        arguments.command = words[0]
    else:
        arguments, unknown = parser.parse_known_args(words)
    if unknown:
        flags = set(_flags_of(commands.choices[arguments.command]))
        for before, word in zip(["", *unknown], unknown, strict=False):
            name = word.partition("=")[0]
            kind = "option" if word.startswith("-") else "argument"
            if kind == "argument" and before.startswith("-") and "=" not in before:
                continue  # the word may be the value of that option
            print_error(f"{name}: is no {kind} of {arguments.command}{did_you_mean(name, flags)}")
        return _MISUSED
    try:
        return arguments.run(arguments)
    except EngineNotInstalled as error:
        print_error(str(error))
        return 1


class _Parser(argparse.ArgumentParser):
    """Prints the mistake before the usage, which is long. Parsers of commands are of this type too."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {printable(message)}", file=sys.stderr)
        self.print_usage(sys.stderr)
        self.exit(_MISUSED)


def _other_commands() -> tuple[Callable[[Any], None], ...]:
    """Returns the functions that add the commands other than `serve`, which starts without their libraries."""
    from kestrel_grpc.cli.accept import add_accept_command
    from kestrel_grpc.cli.ask import add_client_commands
    from kestrel_grpc.cli.batch.command import add_batch_command
    from kestrel_grpc.cli.bench.command import add_bench_command
    from kestrel_grpc.cli.chat import add_chat_command
    from kestrel_grpc.cli.compile import add_compile_command
    from kestrel_grpc.cli.completion import add_completion_command
    from kestrel_grpc.cli.demo import add_demo_command
    from kestrel_grpc.cli.evaluate import add_evaluate_command
    from kestrel_grpc.cli.frames import add_frames_command
    from kestrel_grpc.cli.health import add_health_command
    from kestrel_grpc.cli.status import add_status_commands
    from kestrel_grpc.cli.token import add_token_command
    from kestrel_grpc.cli.verify import add_verify_command

    return (
        *(add_verify_command, add_accept_command, add_demo_command, add_token_command),
        *(add_client_commands, add_chat_command, add_frames_command, add_batch_command),
        *(add_evaluate_command, add_bench_command),
        *(add_status_commands, add_health_command, add_compile_command, add_completion_command),
    )


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the flags of a command and of its actions, without flags that are always refused."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _flags_of(inner)
        elif action.help is not argparse.SUPPRESS:
            yield from action.option_strings
