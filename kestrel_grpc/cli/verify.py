"""Implements `kestrel-grpc verify`: compares a machine's answers with a reference fixture. Starts no server."""

from __future__ import annotations

import argparse
from pathlib import Path

from kestrel_grpc.cli.common import refuse, require_engine
from kestrel_grpc.config.options import ConfigurationError, ServerConfig, named_values
from kestrel_grpc.process.terminal import print_error
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError


def add_verify_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    verify = subparsers.add_parser(
        "verify",
        help="check a machine against a reference fixture",
        description="Run every case of a reference fixture and print which pass; exit 1 if one does not.",
    )
    verify.add_argument("folder", metavar="FOLDER", type=Path)
    verify.add_argument("--device", help="as for serve (default: auto)")
    verify.add_argument("--dtype", help="as for serve (default: auto)")
    verify.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="an option of serve that says how the engine computes, such as text-backend=fused; may be repeated",
    )
    verify.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    require_engine()
    from kestrel_runtime.verify.reference_fixture import ReferenceFixture

    try:
        fixture = ReferenceFixture(arguments.folder, _engine_config(arguments))
        num_passed, num_failed = fixture.run(lambda line: print(line, flush=True))
    except ConfigurationError as error:
        return refuse(error)
    except CheckpointError as error:
        print_error(str(error))
        return 1
    print(f"{num_passed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Parses --device, --dtype and --set. Raises `ConfigurationError`."""
    given = {**named_values(arguments.set), "device": arguments.device, "dtype": arguments.dtype}
    return ServerConfig.parse(given, {}).engine_config()
