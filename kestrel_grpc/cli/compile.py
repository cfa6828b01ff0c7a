"""Implements `kestrel-grpc compile`: compiles kernels of published models for cards that this machine lacks."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from kestrel_grpc.cli.common import require_engine
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.process.terminal import print_error
from kestrel_runtime.api.errors import CheckpointError

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
_MODELS = ("moondream2", "moondream3", "moondream3-fp8")
_PRECISIONS = ("bfloat16", "float8")


def add_compile_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    compiling = subparsers.add_parser(
        "compile",
        help="compile the kernels of a GPU ahead, without that GPU",
        description="Compile the kernels that a server with default options needs, for GPUs that need not be here. "
        "Servers of this installation find them and start sooner. Needs Triton and a C compiler.",
    )
    compiling.add_argument(
        "--target",
        action="append",
        choices=CAPABILITIES,
        required=True,
        help="compute capability of the GPU, 9.0 for an H100; may be repeated",
    )
    compiling.add_argument("--model", action="append", choices=_MODELS, help="may be repeated (default: each)")
    compiling.add_argument(
        "--precision", action="append", choices=_PRECISIONS, help="may be repeated (default: what the GPU has)"
    )
    compiling.add_argument(
        "--into", metavar="FOLDER", type=Path, help="default: where servers of this installation look for them"
    )
    compiling.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    require_engine()
    from kestrel_runtime.models.moondream.kernel_compilation import compile_ahead

    for target, model in itertools.product(arguments.target, arguments.model or _MODELS):
        major, _, minor = target.partition(".")
        capability = int(major), int(minor)
        for precision in arguments.precision or _PRECISIONS[: 1 + (capability >= (8, 9))]:
            try:
                settings = ServerConfig.parse({"model": model, "precision": precision}, {}).engine_config()
                num_kernels, folder = compile_ahead(model, settings, capability, arguments.into)
            except (CheckpointError, OSError) as error:
                print_error(f"{model}, {precision}, {target}: {error}")
                return 1
            print(f"{model}, {precision}, {target}: {num_kernels} kernels in {folder}", flush=True)
    return 0
