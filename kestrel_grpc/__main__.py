"""The command `kestrel-grpc`: serve, verify, and the commands that ask a server. Reads arguments, sets exit codes.

What is heavy is imported by the command that needs it, so that asking a server does not load the model's libraries.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# gRPC's core writes lines of its own form to standard error, and reads this only while it is being imported. What
# they say about a call is in its status, and what they say about the peers of a server is for whoever asks for it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from kestrel_grpc import __version__
from kestrel_grpc.access.tokens import TokenFileError
from kestrel_grpc.allocator import return_free_memory, return_large_blocks, set_apart_what_stays
from kestrel_grpc.cli.ask import add_client_commands
from kestrel_grpc.cli.demo import add_demo_command
from kestrel_grpc.cli.health import add_health_command
from kestrel_grpc.cli.token import add_token_command
from kestrel_grpc.config.options import (
    ConfigurationError,
    ServerConfig,
    add_serve_arguments,
    effective_values,
    named_values,
)
from kestrel_grpc.process_end import end_now, end_within
from kestrel_grpc.telemetry.logs import set_up_logging
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError

# The engine's thread and the event loop's both have many short turns with the interpreter: who has given it up for
# a launch or a write waits at most so long until it is asked back.
SWITCH_INTERVAL_S = 0.00005
END_TIMEOUT_S = 20.0
"""For the process to end by itself once its engine is closed or dead. In order it takes a few seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kestrel-grpc", description="A gRPC inference server for the Moondream vision-language models."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model until SIGTERM. Flags win over environment variables, and these over the file.",
        allow_abbrev=False,
    )
    add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    config = commands.add_parser(
        "config",
        help="show how a server would be set up",
        description="Print the value of every option of `serve` and where it came from, as a file for --config.",
        allow_abbrev=False,
    )
    add_serve_arguments(config)
    config.set_defaults(run=_config)
    verify = commands.add_parser(
        "verify",
        help="check a machine against a golden folder",
        description="Run every case of a golden folder and print which hold; exit 1 if one does not.",
    )
    verify.add_argument("folder", metavar="FOLDER", type=Path)
    verify.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    verify.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="default: auto"
    )
    verify.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="an option of serve that says how the engine computes, such as text-path=fused; may be repeated",
    )
    verify.set_defaults(run=_verify)
    add_demo_command(commands)
    add_token_command(commands)
    add_client_commands(commands)
    add_health_command(commands)
    return parser


def _config(arguments: argparse.Namespace) -> int:
    try:
        print(effective_values(vars(arguments), os.environ))
    except ConfigurationError as error:
        return _refuse(error)
    return 0


def _refuse(error: ConfigurationError) -> int:
    for problem in error.problems:
        _complain(problem)
    return 2


def _serve(arguments: argparse.Namespace) -> int:
    try:
        config = ServerConfig.parse(vars(arguments), os.environ)
    except ConfigurationError as error:
        return _refuse(error)
    set_up_logging(config.log_level, line_format=config.log_format)
    from kestrel_grpc.access.tls import CertificateError
    from kestrel_grpc.images.image_uris import RemoteImagesUnavailable
    from kestrel_grpc.listeners import PortUnavailable
    from kestrel_grpc.server import Server, require_usable
    from kestrel_grpc.telemetry.tracing import TracingUnavailable, require_tracing
    from kestrel_runtime.api.engine import EngineStatus
    from kestrel_runtime.engine.engine import LocalEngine
    from kestrel_runtime.engine.warm_up import WarmUpFailed, warm_up

    async def run() -> tuple[bool, bool]:
        await warm_up(engine)
        set_apart_what_stays()
        server = Server(engine, config, at_rest=at_rest)
        return await server.serve(), server.has_closed

    # Before there is a server it has no connections.
    ended_well, has_closed = False, True
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    at_rest = return_free_memory if return_large_blocks() else None
    try:
        require_usable(config)
        if config.tracing:
            require_tracing(os.environ)
        with _ending_at_sigterm():
            engine = LocalEngine.start(config.engine_config())
            engine.on_status_change(lambda now: end_within(END_TIMEOUT_S) if now is EngineStatus.DEAD else None)
            try:
                with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                    ended_well, has_closed = runner.run(run())
            finally:
                engine.close()
                if not (engine.has_ended and has_closed):
                    end_now(0 if ended_well else 1)
    except (TokenFileError, CertificateError) as error:
        _complain(str(error))
        return 2
    except (CheckpointError, PortUnavailable, RemoteImagesUnavailable, TracingUnavailable, WarmUpFailed) as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:  # while the model was being loaded or warmed up
        return 130
    return 0 if ended_well else 1


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Until the server listens for signals itself: a container's first process gets only those that it handles."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else the standard loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


def _verify(arguments: argparse.Namespace) -> int:
    from kestrel_runtime.models.moondream.verify import GoldenFolder

    try:
        config = _engine_options(arguments)
        folder = GoldenFolder(arguments.folder, config)
        num_passed, num_failed = folder.run(lambda line: print(line, flush=True))
    except ConfigurationError as error:
        return _refuse(error)
    except CheckpointError as error:
        _complain(str(error))
        return 1
    print(f"{num_passed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def _engine_options(arguments: argparse.Namespace) -> EngineConfig:
    """Device, type and what is `--set`; raises `ConfigurationError`."""
    given = {**named_values(arguments.set), "device": arguments.device, "dtype": arguments.dtype}
    return ServerConfig.parse(given, {}).engine_config()


def _complain(text: str) -> None:
    print(f"kestrel-grpc: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
