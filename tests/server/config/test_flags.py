"""Flags of the command line and the table of the README show every option."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields

from kestrel_grpc.config.flags import add_serve_arguments, markdown_table
from kestrel_grpc.config.options import ServerConfig, options
from kestrel_grpc.config.settings import environment_name, flag_name


def test_help_and_table_show_every_option() -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    shown = " ".join(parser.format_help().split())
    table = markdown_table()
    for name, option in options():
        assert flag_name(name) in shown
        assert f"`{flag_name(name)}` | `{environment_name(name)}` | {option.default_text} " in table
    assert len(table.splitlines()) == 2 + len(fields(ServerConfig))


def test_module_prints_the_table() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "kestrel_grpc.config.flags"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == markdown_table() + "\n"
