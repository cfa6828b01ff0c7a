"""The commands info, models, load and adapter: what a running server is and serves, and how busy it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kestrel_client import Adapter, Client
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
    _add_adapter_command(subparsers)


def _add_adapter_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show, load and unload adapters"
    command = subparsers.add_parser("adapter", help=summary, description=f"{summary.capitalize()}.")
    actions = command.add_subparsers(metavar="ACTION", dest="action", required=True)
    for action, what, act in (
        ("list", "show the adapters that are loaded", lambda client, name: client.list_adapters()),
        ("load", "read the files of an adapter anew and load them", Client.load_adapter),
        ("unload", "free the slot of an adapter once no request uses it", Client.unload_adapter),
    ):
        parser = actions.add_parser(action, help=what, description=f"{what.capitalize()}.")
        if action == "list":
            parser.set_defaults(name="")
        else:
            parser.add_argument("name", help="as requests name it, such as colours or colours@200")
        add_client_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.set_defaults(run=partial(run_with_client, partial(_print_adapters, act)))


def _print_adapters(
    act: Callable[[Client, str], Adapter | Sequence[Adapter]], client: Client, arguments: argparse.Namespace
) -> None:
    found = act(client, arguments.name)
    adapters = [found] if isinstance(found, Adapter) else found
    if arguments.json:
        print(json.dumps([dataclasses.asdict(adapter) for adapter in adapters]))
        return
    for adapter in adapters:
        state = "" if adapter.is_current else "  until its requests have ended"
        print(f"{adapter.name:<36} {adapter.digest[:12]}  {adapter.request_count} requests{state}")


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
