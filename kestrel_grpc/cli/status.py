"""The commands info, models and load: what a running server is, what it serves and how busy it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kestrel_client import Client
from kestrel_grpc.cli.ask import add_client_arguments, run_with_client


def add_status_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands; each sets `run`, which takes the parsed arguments and returns the exit status."""
    for name, summary, read in (
        ("info", "show which server this is and what it accepts", _info),
        ("models", "show the models that are served", _models),
        ("load", "show how busy a server is", _load),
    ):
        parser = subparsers.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        add_client_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.set_defaults(run=partial(run_with_client, partial(_print, read)))


def _print(read: Callable[[Client], Any], client: Client, arguments: argparse.Namespace) -> None:
    found = read(client)
    if arguments.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for item in found if isinstance(found, Sequence) else [found]:
        for name, value in _flat(item):
            print(f"{name:<36} {value}")


def _info(client: Client) -> Mapping[str, Any]:
    return dataclasses.asdict(client.server_info())


def _models(client: Client) -> Sequence[Mapping[str, Any]]:
    return [dataclasses.asdict(model) for model in client.list_models()]


def _load(client: Client) -> Mapping[str, Any]:
    return dataclasses.asdict(client.load())


def _flat(item: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Rows of a table: `limits.max_image_bytes` and 33,554,432."""
    rows: list[tuple[str, str]] = []
    for name, value in item.items():
        match value:
            case Mapping():
                rows += _flat(value, f"{prefix}{name}.")
            case list() | tuple() if value and isinstance(value[0], Mapping):
                for inner in value:
                    rows += _flat(inner, f"{prefix}{name}.")
            case list() | tuple():
                rows.append((f"{prefix}{name}", ", ".join(map(str, value))))
            case None:
                continue
            case float():
                rows.append((f"{prefix}{name}", f"{value:.4g}"))
            case bool() | str():
                rows.append((f"{prefix}{name}", str(value)))
            case _:
                rows.append((f"{prefix}{name}", f"{value:,}"))
    return rows
