"""The options as flags of the command line, and as the table of docs/configuration.md.

`python -m kestrel_grpc.config.flags` prints that table.
"""

from __future__ import annotations

import argparse
from typing import Any

from kestrel_grpc.config.option_parsers import on_or_off
from kestrel_grpc.config.options import options
from kestrel_grpc.config.settings import REPLACED, environment_name, flag_name


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag. Values stay texts: `ServerConfig.parse` checks them with those of the environment."""
    for name, option in options():
        unit = f", in {option.unit}" if option.unit else ""
        # A switch without a value means on.
        may_stand_alone: dict[str, Any] = {"nargs": "?", "const": "on"} if option.parse is on_or_off else {}
        parser.add_argument(
            flag_name(name),
            **may_stand_alone,
            metavar=option.unit.upper() or name.rsplit("_", 1)[-1].upper(),
            help=f"{option.help}{unit} (default: {option.default_text}; {environment_name(name)})",
        )
    for name in REPLACED:  # for an error that names the new one
        parser.add_argument(flag_name(name), help=argparse.SUPPRESS)


def markdown_table() -> str:
    """The table of options as the README shows it."""
    rows = ["| Flag | Environment | Default | Unit | What it sets |", "|---|---|---|---|---|"]
    for name, option in options():
        flag, variable = flag_name(name), environment_name(name)
        rows.append(f"| `{flag}` | `{variable}` | {option.default_text} | {option.unit} | {option.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown_table())
