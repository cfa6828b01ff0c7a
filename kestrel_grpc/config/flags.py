"""Makes the flags of the command line and their help from the options, and the table of docs/configuration.md.

`python -m kestrel_grpc.config.flags` prints the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from kestrel_grpc.config.options import ServerConfig, options, settings_of
from kestrel_grpc.config.sources import FILE_OPTION, environment_name, flag_name
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.options import Option, on_or_off, options_of, shown

_KNOWN_WITH_MODEL = "; known when the model is loaded: see the log, or GetServerInfo"


FIRST_OPTIONS = frozenset(
    (
        "model",
        "device",
        "precision",
        "adapters",
        "host",
        "port",
        "http_port",
        "tokens",
        "tls_certificate",
        "tls_key",
    )
)
"""The options that most servers need, which `--help` shows; `--help-all` shows every option."""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag, and those of help to a parser that has none.

    Values stay texts: `ServerConfig.parse` checks them with those of the environment.
    """
    parser.usage = f"{parser.prog} [OPTION ...]"
    parser.add_argument(
        "-h", "--help", action=_Help, first_only=True, help="show the options that most servers need"
    )
    parser.add_argument("--help-all", action=_Help, first_only=False, help="show all options")
    add_engine_arguments(parser)
    group = parser.add_argument_group("server")
    for _, item in options_of(ServerConfig):
        _add_flag(group, item)


def add_engine_arguments(parser: argparse.ArgumentParser, *others: str) -> None:
    """Adds the flags of the engine, and of those options of the server that `others` names."""
    group = parser.add_argument_group("engine")
    for _, item in options_of(EngineConfig):
        _add_flag(group, item)
    for _, item in options_of(ServerConfig):
        if item.name in others:
            _add_flag(group, item)


class _Help(argparse.Action):
    """Prints the help and exits. With `first_only` it leaves out all options but `FIRST_OPTIONS`."""

    def __init__(self, option_strings: list[str], dest: str, *, first_only: bool, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self._first_only = first_only

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(_first_help(parser) if self._first_only else parser.format_help(), end="")
        parser.exit()


def _first_help(parser: argparse.ArgumentParser) -> str:
    """Returns the help with `FIRST_OPTIONS` alone, which says how many others there are."""
    found = list(options())
    shown_parser = argparse.ArgumentParser(
        prog=parser.prog,
        usage=parser.usage,
        description=parser.description,
        epilog=f"{len(found) - len(FIRST_OPTIONS)} more options: {parser.prog} --help-all. Each option can also be "
        "set by its variable, or in a file given with --config.",
        add_help=False,
    )
    group = shown_parser.add_argument_group("options")
    for item in found:
        if item.name in FIRST_OPTIONS:
            _add_flag(group, item)
    return shown_parser.format_help()


def _add_flag(group: argparse._ArgumentGroup, item: Option) -> None:
    # A switch without a value means on.
    may_stand_alone: dict[str, Any] = {"nargs": "?", "const": "on"} if item.parse is on_or_off else {}
    group.add_argument(
        flag_name(item.name),
        **may_stand_alone,
        metavar="on|off" if may_stand_alone else item.unit.upper() or item.name.rsplit("_", 1)[-1].upper(),
        help=f"{item.help} (default: {item.default_text}; {environment_name(item.name)})",
    )


def markdown_table() -> str:
    """Returns the table of options for the documentation."""
    rows = ["| Flag | Environment | Default | Unit | What it sets |", "|---|---|---|---|---|"]
    for item in options():
        flag, variable = flag_name(item.name), environment_name(item.name)
        rows.append(f"| `{flag}` | `{variable}` | {item.default_text} | {item.unit} | {item.help} |")
    return "\n".join(rows)


def effective_values(
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    device_type_of: Callable[[EngineConfig], str],
) -> str:
    """Returns every option as a line of the file, with the source of its value. Raises `ConfigurationError` as
    parsing does.

    `device_type_of` returns cpu or cuda for an engine: the values that `auto` resolves to depend on it.
    """
    config = ServerConfig.parse(flags, environment)
    engine = config.engine_config()
    chosen = engine.resolved(device_type_of(engine))
    settings = settings_of(flags, environment, [])
    lines: list[str] = []
    for owner in (config.engine, config):
        for field, item in options_of(owner):
            value, here = getattr(owner, field), getattr(chosen, field, None)
            is_unset = value is None or value == ()
            source = settings[item.name].source if item.name in settings else "default"
            if is_unset and here not in (None, ()):
                value, source = here, "default on this device"
            elif is_unset:
                value = item.default_text
                source += _KNOWN_WITH_MODEL if field == "num_kv_pages" else ""
            elif value == "auto" and here not in (None, "auto"):
                source += f"; here {shown(here)}"
            line = f"{item.name} = {_toml(value)}"
            if is_unset or item.name == FILE_OPTION:
                line = f"# {line}"
            lines.append(f"{line:<47} # {source}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        items = ("=".join(item) if isinstance(item, tuple) else item for item in value)
        return f"[{', '.join(map(_toml, items))}]"
    # JSON and TOML write strings, numbers and booleans in the same way.
    return json.dumps(value if isinstance(value, int | float) else str(value), ensure_ascii=False)


if __name__ == "__main__":
    print(markdown_table())
