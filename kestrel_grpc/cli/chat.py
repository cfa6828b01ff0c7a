"""Implements the client command chat: a conversation, of which each line of the input is a question.

On a terminal the lines are edited, and a failed question ends neither the conversation nor the command. From a pipe
each line is a question as well, and the first failure ends the command.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel_grpc.cli.ask import IMAGE_HELP, add_request_flags, options_of, print_text
from kestrel_grpc.cli.common import add_client_arguments, explain, run_with_client, show_json
from kestrel_grpc.process.terminal import print_error

# The client imports gRPC, which no help needs: what uses it imports it when it runs.
if TYPE_CHECKING:
    from kestrel_client import ChatMessage, Client

_HELP = "/image NAME adds an image to the next question, /new begins another conversation, /quit ends"


def add_chat_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "chat",
        help="have a conversation about images",
        description=f"Have a conversation, asking a running server. Each line is a question; {_HELP}.",
    )
    parser.add_argument("image", metavar="IMAGE", nargs="*", help=f"{IMAGE_HELP}; shown with the first question")
    add_client_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions that precede the conversation")
    parser.add_argument(
        "--reasoning", action="store_true", help="let the model reason first, and print its reasoning on stderr"
    )
    add_request_flags(parser)
    parser.set_defaults(run=partial(run_with_client, _chat))


def _chat(client: Client, arguments: argparse.Namespace) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = _Conversation(client, arguments)
    if is_terminal:
        print_error(_HELP)
    for line in _lines(is_terminal):
        command, _, rest = line.partition(" ")
        try:
            if command == "/quit":
                return
            if command == "/new":
                conversation.begin()
            elif command == "/image":
                conversation.show(rest.strip())
            elif command.startswith("/"):
                raise ValueError(f"{command}: no such command; {_HELP}")
            else:
                conversation.ask(line)
        except Exception as error:
            if not is_terminal or not _is_reported(error):
                raise
            print_error(explain(error))
        except KeyboardInterrupt:  # ends the answer
            if not is_terminal:
                raise
            print(flush=True)


def _is_reported(error: Exception) -> bool:
    from kestrel_client import KestrelClientError

    return isinstance(error, KestrelClientError | OSError | ValueError) and not isinstance(error, BrokenPipeError)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yields the lines of the input that are not empty, without the whitespace around them."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - makes `input` edit its line

        with contextlib.suppress(EOFError):
            while True:
                if line := input("> ").strip():
                    yield line
        print(flush=True)
        return
    for line in sys.stdin:
        if line.strip():
            yield line.strip()


class _Conversation:
    """Holds the turns so far, and the images of the next question."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self._options = options_of(arguments)
        self._turns: list[ChatMessage] = []
        self._images: list[str] = []
        self.begin()
        for image in arguments.image:
            self.show(image)

    def begin(self) -> None:
        """Forgets all turns and images."""
        from kestrel_client import ChatMessage

        system = self._arguments.system
        self._turns = [] if system is None else [ChatMessage("system", system)]
        self._images = []

    def show(self, image: str) -> None:
        """Adds an image to the next question. Raises OSError for a file that is not there, ValueError without a
        name."""
        from kestrel_client.images import is_on_server

        if not image:
            raise ValueError(f"/image: which one? {_HELP}")
        if not is_on_server(image):
            with Path(image).open("rb"):
                pass
        self._images.append(image)

    def ask(self, question: str) -> None:
        """Prints the answer to a question. One that fails leaves the conversation and the images as they were."""
        from kestrel_client import ChatMessage

        turns = [*self._turns, ChatMessage("user", question, tuple(self._images))]
        reasoning = self._arguments.reasoning or None
        if self._arguments.json:
            result = self._client.complete_chat(turns, reasoning=reasoning, **self._options)
            show_json(dataclasses.asdict(result))
        else:
            with self._client.chat(turns, reasoning=reasoning, **self._options) as stream:
                print_text(stream.deltas())
                result = stream.result()
        self._turns = [*turns, ChatMessage("assistant", result.answer)]
        self._images = []
