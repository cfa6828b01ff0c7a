"""Implements `kestrel-grpc serve` and `kestrel-grpc config`: runs a server, or prints its options."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys

from kestrel_grpc.cli.common import EngineNotInstalled, refuse, require_engine
from kestrel_grpc.config.flags import add_serve_arguments, effective_values
from kestrel_grpc.config.options import ConfigurationError, ServerConfig, option_names, settings_of
from kestrel_grpc.config.sources import environment_warnings
from kestrel_grpc.process.bytecode import keep_bytecode
from kestrel_grpc.process.exit import END_TIMEOUT_S, end_now, end_within
from kestrel_grpc.process.resources import (
    SWITCH_INTERVAL_S,
    freeze_existing_objects,
    loop_factory,
    lower_grpc_threads,
    missing_resource,
    raise_descriptor_limit,
    return_free_memory,
    return_large_blocks,
)
from kestrel_grpc.process.terminal import print_error
from kestrel_grpc.telemetry.logs import report, set_up_logging

_log = logging.getLogger(__name__)


def add_serve_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `serve` and `config`; each sets `run`, which takes the parsed arguments and returns the exit status."""
    serve = subparsers.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model until SIGTERM. Flags take precedence over environment variables, and these over "
        "the file.",
        allow_abbrev=False,
        add_help=False,
    )
    add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    config = subparsers.add_parser(
        "config",
        help="show the options that a server would use",
        description="Print the value of every option of `serve` and where it came from, as a file for --config.",
        allow_abbrev=False,
        add_help=False,
    )
    add_serve_arguments(config)
    config.set_defaults(run=_config)


def _config(arguments: argparse.Namespace) -> int:
    require_engine()  # `auto` stands for other values on a GPU, which PyTorch finds
    from kestrel_runtime.models.loaded_model import device_type

    try:
        print(effective_values(vars(arguments), os.environ, device_type))
        for warning in environment_warnings(option_names(), os.environ):
            print_error(warning)
    except ConfigurationError as error:
        return refuse(error)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    given = settings_of(vars(arguments), os.environ, []).get("log_format")
    is_json = given is not None and given.text == "json"
    if is_json:  # also for mistakes in the other options
        set_up_logging("info", line_format="json")
    try:
        config = ServerConfig.parse(vars(arguments), os.environ)
    except ConfigurationError as error:
        return _refuse(error)
    if is_json:
        logging.getLogger().setLevel(config.log_level.upper())
    else:
        set_up_logging(config.log_level, line_format=config.log_format)
    for warning in environment_warnings(option_names(), os.environ):
        _log.warning("%s", warning)
    try:
        require_engine()
    except EngineNotInstalled as error:
        report(str(error))
        return 1
    # The engine's libraries take seconds to import: all checks that do not need them precede the import.
    from kestrel_grpc.access.tls import CertificateError
    from kestrel_grpc.access.token_file import TokenFileError
    from kestrel_grpc.images.image_uris import RemoteImagesUnavailable
    from kestrel_grpc.process.free_ports import PortUnavailable
    from kestrel_grpc.requirements import require_usable
    from kestrel_grpc.telemetry.tracing import TracingUnavailable, require_tracing
    from kestrel_runtime.api.errors import CheckpointError
    from kestrel_runtime.models.registry import check_local_checkpoint

    try:
        require_usable(config)
        check_local_checkpoint(config.engine.model, config.engine.revision)
        if config.tracing:
            require_tracing(os.environ)
        return _run(config)
    except ConfigurationError as error:
        return _refuse(error)
    except (TokenFileError, CertificateError) as error:
        report(str(error))
        return 2
    except (CheckpointError, PortUnavailable, RemoteImagesUnavailable, TracingUnavailable) as error:
        report(str(error))
        return 1
    except (OSError, MemoryError) as error:
        if (want := missing_resource(error)) is None:
            raise
        report(f"the system does not give what a server needs: {want}")
        return 1
    except KeyboardInterrupt:  # while the model was being loaded or warmed up
        return 130


def _refuse(error: ConfigurationError) -> int:
    """Reports each problem; returns the exit status."""
    for problem in error.problems:
        report(problem)
    return 2


def _run(config: ServerConfig) -> int:
    """Serves until a signal, in one process or in several; returns the exit status."""
    if config.devices is None and config.frontends == 0:
        return _run_server(config)
    # These libraries are for several processes only.
    from kestrel_grpc.multiprocess.supervision.folder import NoPrivateFolder
    from kestrel_grpc.multiprocess.supervision.layout import layout_of, placed

    layout = layout_of(config, os.environ)
    if layout.num_frontends == 0:
        (place,) = layout.cores
        os.environ.update(place.environment)
        return _run_server(placed(config, place))
    from kestrel_grpc.multiprocess.supervision.supervisor import supervise

    set_up_logging(config.log_level, line_format=config.log_format, process="supervisor")
    try:
        return supervise(config, layout)
    except NoPrivateFolder as error:
        if config.frontends != "auto" or len(layout.cores) > 1:
            report(str(error))
            return 1
        _log.warning("one process serves calls and runs the engine: %s", error)
    set_up_logging(config.log_level, line_format=config.log_format)
    return _run_server(placed(config, layout.cores[0]))


def _run_server(config: ServerConfig) -> int:
    """Serves until a signal, in this process; returns the exit status."""
    from kestrel_grpc.process.libraries import load_torch_libraries

    torch_libraries = load_torch_libraries()
    from kestrel_runtime.models.background_load import BackgroundLoad

    sys.setswitchinterval(SWITCH_INTERVAL_S)  # also for threads that load during imports
    raise_descriptor_limit()
    at_rest = return_free_memory if return_large_blocks() else None
    engine_config = config.engine_config()
    loading = BackgroundLoad(engine_config, torch_libraries)
    torch_libraries.join()
    # The libraries of the engine are imported while the model is being loaded.
    from kestrel_grpc.server import Server
    from kestrel_runtime.api.engine import EngineStatus
    from kestrel_runtime.engine.engine import LocalEngine
    from kestrel_runtime.engine.warm_up import WarmUpFailed, warm_up
    from kestrel_runtime.memory.host_limits import processor_quota

    async def run() -> tuple[bool, bool]:
        await warm_up(engine)
        freeze_existing_objects()
        server = Server(engine, config, at_rest=at_rest, num_processors=processor_quota())
        lower_grpc_threads()
        keep_bytecode()
        return await server.serve(), server.has_closed

    # Without a server there are no connections yet.
    ended_well, has_closed = False, True
    gc.freeze()  # collections before and after loading the model need not examine imported objects
    engine = LocalEngine(loading.result(), engine_config, owns_model=True)
    # Logged after the model was loaded: a start that fails reports its cause in one line.
    _log.info("%s", config.precision_line())
    engine.on_status_change(lambda now: end_within(END_TIMEOUT_S) if now is EngineStatus.DEAD else None)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            ended_well, has_closed = runner.run(run())
    except WarmUpFailed as error:
        report(str(error))
        return 1
    finally:
        engine.close()
        if not (engine.has_ended and has_closed):
            end_now(0 if ended_well else 1)
    return 0 if ended_well else 1
