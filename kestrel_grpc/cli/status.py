"""Implements the commands info, models, load, usage, adapter, clear-cache and cancel, for operators of a server."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kestrel_grpc.cli.common import add_client_arguments, print_table, run_with_client, show, show_json
from kestrel_grpc.process.terminal import print_error

if TYPE_CHECKING:
    from kestrel_client import Adapter, Client, EngineLoad, MemoryPlan

_NOTHING = "-"
"""Stands for a value that the server does not report."""


def add_status_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands; each sets `run`, which takes the parsed arguments and returns the exit status."""
    for name, summary, command in (
        ("info", "show which server this is, its engines, and what it accepts", _print_info),
        ("models", "show the models that are served", _print_models),
        ("load", "show how busy a server is, each of its engines and of its processes", _print_load),
        ("usage", "show the requests and tokens of each caller since the server was started", _print_usage),
    ):
        parser = subparsers.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        add_client_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.set_defaults(run=partial(run_with_client, command))
    _add_adapter_command(subparsers)
    _add_commands_of_operators(subparsers)


def _add_adapter_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show, load, unload, upload and remove adapters"
    command = subparsers.add_parser("adapter", help=summary, description=f"{summary.capitalize()}.")
    actions = command.add_subparsers(metavar="ACTION", dest="action", required=True)
    for action, what, act in (
        ("list", "show the adapters that requests may name, and which of them are loaded", _print_adapters),
        ("load", "read the files of an adapter anew and load them", _print_loaded),
        ("unload", "free the slot of an adapter once no request uses it", _print_unloaded),
        ("remove", "remove an adapter from the folder of adapters of a server", _print_removed),
    ):
        parser = actions.add_parser(action, help=what, description=f"{what.capitalize()}.")
        if action == "list":
            parser.set_defaults(name="")
        else:
            parser.add_argument("name", help="as requests name it, such as colours or colours@200")
        add_client_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.set_defaults(run=partial(run_with_client, act))
    _add_upload_command(actions)


def _add_upload_command(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "add an adapter to the folder of adapters of a server"
    parser = actions.add_parser("upload", help=what, description=f"{what.capitalize()}.")
    parser.add_argument("name", help="as requests will name it, such as colours or colours@200")
    parser.add_argument("path", help="folder as PEFT writes it, or with one .safetensors file, or such a file")
    parser.add_argument("--replace", action="store_true", help="replace an adapter of this name")
    add_client_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")
    parser.set_defaults(run=partial(run_with_client, _print_uploaded))


def _add_commands_of_operators(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "remove what a server has cached, of all callers or of some"
    clear = subparsers.add_parser("clear-cache", help=summary, description=f"{summary.capitalize()}.")
    owner = clear.add_mutually_exclusive_group()
    owner.add_argument("--caller", metavar="NAME", help="only what is cached for the token of this name")
    owner.add_argument("--namespace", metavar="NAME", help="only what is cached for tokens with this namespace")
    summary = "cancel requests that run or wait on a server"
    cancel = subparsers.add_parser("cancel", help=summary, description=f"{summary.capitalize()}.")
    chosen = cancel.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--request", metavar="ID", help="requests with this x-request-id")
    chosen.add_argument("--caller", metavar="NAME", help="all requests of the token of this name")
    for parser, act in ((clear, _print_cleared), (cancel, _print_cancelled)):
        add_client_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")
        parser.set_defaults(run=partial(run_with_client, act))


def _print_cleared(client: Client, arguments: argparse.Namespace) -> int | None:
    from kestrel_client import InvalidRequest

    try:
        cleared = client.clear_cache(token=arguments.caller, namespace=arguments.namespace)
    except InvalidRequest as error:
        flag, name = (
            ("caller", arguments.caller) if arguments.caller is not None else ("namespace", arguments.namespace)
        )
        for violation in error.violations:
            print_error(f"--{flag} {name!r} {violation.description}")
        return 1
    if arguments.json:
        show_json(dataclasses.asdict(cleared))
    else:
        counts = f"{cleared.page_count:,} pages, {cleared.image_count:,} images and {cleared.crop_count:,} crops"
        show(f"removed {counts}")
    return None


def _print_cancelled(client: Client, arguments: argparse.Namespace) -> None:
    count = client.cancel_requests(request_id=arguments.request, token=arguments.caller)
    if arguments.json:
        show_json({"cancelled_request_count": count})
    else:
        show(f"cancelled {_num_requests(count)}")


def _print_usage(client: Client, arguments: argparse.Namespace) -> None:
    callers = client.usage()
    if arguments.json:
        show_json([dataclasses.asdict(caller) for caller in callers])
        return
    columns = ("caller", "answered", "failed", "refused", "tokens in", "of these cached", "tokens out")
    rows = (dataclasses.astuple(caller) for caller in callers)
    print_table(columns, ((name or "(no token)", *(f"{count:,}" for count in counts)) for name, *counts in rows))
    if not callers:
        print_error("no caller has sent a request since the server was started")


def _print_adapters(client: Client, arguments: argparse.Namespace) -> None:
    loaded = client.list_adapters()
    others = [name for name in client.adapter_names() if name not in {adapter.name for adapter in loaded}]
    if arguments.json:
        facts = [*({**dataclasses.asdict(adapter), "is_loaded": True} for adapter in loaded)]
        show_json([*facts, *({"name": name, "is_loaded": False} for name in others)])
        return
    for adapter in loaded:
        state = "" if adapter.is_current else "  until its requests have ended"
        show(f"{adapter.name:<36} {adapter.digest[:12]}  {_requests(adapter)}{state}")
    for name in others:
        show(f"{name:<36} not loaded")
    if not loaded and not others:
        print_error(
            "the server has no adapters; `kestrel-grpc adapter upload NAME PATH` adds one to a server that was "
            "started with `--adapters FOLDER`"
        )


def _print_loaded(client: Client, arguments: argparse.Namespace) -> None:
    adapter = client.load_adapter(arguments.name)
    _print_adapter(adapter, arguments, f"{adapter.digest[:12]}  {_requests(adapter)}")


def _print_uploaded(client: Client, arguments: argparse.Namespace) -> int | None:
    from kestrel_client import AdapterExists

    try:
        uploaded = client.upload_adapter(arguments.name, arguments.path, replace=arguments.replace)
    except AdapterExists as error:
        print_error(f"{error}" if arguments.replace else f"{error}; --replace asks for it")
        return 1
    if arguments.json:
        show_json(dataclasses.asdict(uploaded))
    else:
        done = "has been replaced" if uploaded.replaced else "has been added"
        show(f"{uploaded.name:<36} {uploaded.digest[:12]}  {done}; requests can name it now")
    return None


def _print_unloaded(client: Client, arguments: argparse.Namespace) -> None:
    adapter = client.unload_adapter(arguments.name)
    leaves = f"leaves its slot when no request uses it; now {_requests(adapter)}"
    _print_adapter(adapter, arguments, leaves if adapter.request_count else "has left its slot")


def _print_removed(client: Client, arguments: argparse.Namespace) -> None:
    count = client.delete_adapter(arguments.name)
    if arguments.json:
        show_json({"name": arguments.name, "request_count": count})
    else:
        still = f"; {_num_requests(count)} {'uses' if count == 1 else 'use'} it until the end" if count else ""
        show(f"{arguments.name:<36} has been removed{still}")


def _print_adapter(adapter: Adapter, arguments: argparse.Namespace, line: str) -> None:
    if arguments.json:
        show_json([dataclasses.asdict(adapter)])
    else:
        show(f"{adapter.name:<36} {line}")


def _requests(adapter: Adapter) -> str:
    return _num_requests(adapter.request_count)


def _num_requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


def _print_info(client: Client, arguments: argparse.Namespace) -> None:
    info = client.server_info()
    facts = dataclasses.asdict(info)
    if arguments.json:
        show_json(facts)
        return
    _print_facts({name: value for name, value in facts.items() if name != "engines"})
    rows = (
        (
            str(engine.index),
            engine.device or _NOTHING,
            engine.device_name or _NOTHING,
            _number(engine.max_running_requests or None),
            *_memory(engine.memory_plan),
            engine.device_uuid or _NOTHING,
        )
        for engine in info.engines
    )
    _print_further_table(("engine", "device", "name", "batch", "weights", "KV cache", "memory", "GPU"), rows)


def _print_models(client: Client, arguments: argparse.Namespace) -> None:
    models = [dataclasses.asdict(model) for model in client.list_models()]
    if arguments.json:
        show_json(models)
        return
    for model in models:
        _print_facts(model)


def _print_load(client: Client, arguments: argparse.Namespace) -> None:
    load = client.load()
    facts = dataclasses.asdict(load)
    if arguments.json:
        show_json(facts)
        return
    _print_facts({name: value for name, value in facts.items() if name not in ("engines", "frontends")})
    columns = ("engine", "device", "process", "status", "running", "waiting", "preparing", "pages", "tokens/s")
    _print_further_table(columns, map(_engine_row, load.engines))
    rows = (
        (frontend.name or "(whole server)", str(frontend.process_id), f"{frontend.open_request_count:,}")
        for frontend in load.frontends
    )
    _print_further_table(("front end", "process", "requests"), rows)


def _engine_row(engine: EngineLoad) -> tuple[str, ...]:
    facts = (str(engine.index), engine.device or _NOTHING, _number(engine.process_id), str(engine.status))
    load = engine.load
    if load is None:
        return (*facts, *[_NOTHING] * 5)
    return (
        *facts,
        f"{load.running_request_count:,}",
        f"{load.waiting_request_count:,}",
        f"{load.preprocessing_request_count:,}",
        f"{load.used_page_count:,} of {load.page_count:,}",
        f"{load.output_tokens_per_second:.4g}",
    )


def _memory(plan: MemoryPlan | None) -> tuple[str, ...]:
    """Returns the memory of the weights, of the key-value cache and in total."""
    if plan is None:
        return (_NOTHING,) * 3
    sizes = (plan.weight_bytes, plan.cache_bytes, plan.total_bytes)
    return tuple(f"{num_bytes / 2**30:,.2f} GiB" for num_bytes in sizes)


def _number(value: int | None) -> str:
    return _NOTHING if value is None else str(value)


def _print_further_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Prints an empty line and a table; nothing without rows, which older servers do not report."""
    table = tuple(rows)
    if table:
        print()
    print_table(columns, table)


def _print_facts(item: Mapping[str, Any]) -> None:
    for name, value in _flat(item):
        show(f"{name:<36} {value}")


def _flat(item: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Returns rows of a table, such as `limits.max_image_bytes` and 33,554,432."""
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
