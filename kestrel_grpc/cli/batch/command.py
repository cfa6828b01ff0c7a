"""Implements `kestrel-grpc batch`: answers the lines of a file, or the pictures of a folder, into a file of lines.

The engine runs in this process, or is that of the server at `--address`. Either way a line is a request of the HTTP
port: `lines.py` makes it, `callers.py` has it answered, `run.py` keeps many in flight, and `output.py` writes the
answers so that an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel_grpc.cli.common import add_connection_arguments, add_token_argument, refuse, require_engine, tls_of
from kestrel_grpc.config.flags import add_engine_arguments
from kestrel_grpc.config.options import ConfigurationError, ServerConfig, option_names
from kestrel_grpc.config.sources import flag_name
from kestrel_grpc.process.exit import END_TIMEOUT_S, end_now, end_within
from kestrel_grpc.process.resources import (
    SWITCH_INTERVAL_S,
    freeze_existing_objects,
    loop_factory,
    raise_descriptor_limit,
    return_large_blocks,
)
from kestrel_grpc.process.signals import stop_signals
from kestrel_grpc.process.terminal import print_error
from kestrel_grpc.telemetry.logs import set_up_logging

if TYPE_CHECKING:
    from kestrel_grpc.cli.batch.callers import Caller, ServerAddress
    from kestrel_grpc.cli.batch.lines import Record, Source, Template
    from kestrel_grpc.cli.batch.output import AnyOutput
    from kestrel_grpc.images.image_uris import ImageSource

_FAILED, _MISUSED, _BY_SIGNAL = 1, 2, 128
_SERVER_OPTIONS = (
    *("config", "precision", "served_model_name", "image_hosts", "image_fetch_timeout", "log_level", "log_format"),
)
_IN_FLIGHT_PER_BATCH = 2
"""The requests in flight for each row of the batch: while one is computed, the next is prepared."""
IN_FLIGHT_OF_SERVER = 64
_MAX_IN_FLIGHT = 1024
_TIMEOUT_S = 600.0
_MAX_RETRY_S = 300.0
_STANDARD_OUTPUT = "-"

_log = logging.getLogger(__name__)


def add_batch_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "batch",
        help="answer the lines of a file, or the pictures of a folder, into a file",
        description="Answer each line of IN into a line of OUT, in the same order. The model is loaded into this "
        "process, with the options of serve, unless --address names a server. Exit 0 if every line was answered, 1 "
        "if some failed, 2 for a mistake in the call. Ctrl-C (SIGINT) or SIGTERM ends the run after the answers "
        "that are running, with exit 130 or 143, and the same command with --resume goes on.",
        usage="%(prog)s IN OUT [OPTION ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "input",
        metavar="IN",
        type=Path,
        help="a file of JSON lines (also OpenAI's batch lines), a .parquet file, or a folder of pictures",
    )
    parser.add_argument("output", metavar="OUT", help="file of JSON lines to write; - is standard output")
    parser.add_argument("--skill", metavar="SKILL", help="skill of the lines that name none, such as caption")
    parser.add_argument(
        "--field",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a field of the REST request for the lines that do not have it, such as question=… or "
        "settings.max_tokens=32; VALUE is JSON or else a text; may be repeated",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=_whole_number(0, 2**63 - 1),
        default=0,
        help="a line without a seed gets N plus its number (%(default)s)",
    )
    parser.add_argument(
        "--in-flight",
        metavar="N",
        type=_whole_number(1, _MAX_IN_FLIGHT),
        help=f"requests at a time ({_IN_FLIGHT_PER_BATCH} × --max-batch-size; with --address "
        f"{IN_FLIGHT_OF_SERVER})",
    )
    parser.add_argument("--resume", action="store_true", help="continue OUT where an interrupted run has ended")
    parser.add_argument(
        "--retry-failed", action="store_true", help="answer the failed lines of a complete OUT again"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT")
    parser.add_argument(
        "--coco",
        metavar="FILE",
        type=Path,
        help="with --skill detect and a folder of pictures: write all boxes as a data set in COCO's form, too",
    )
    parser.add_argument(
        "--yolo", metavar="FOLDER", type=Path, help="the same in the form of YOLO: labels/ and data.yaml"
    )
    parser.add_argument("--progress", action="store_true", help="show progress also without a terminal")
    parser.add_argument(
        "--max-retry",
        metavar="SECONDS",
        type=_seconds,
        default=_MAX_RETRY_S,
        help="longest time without an answer in which temporarily refused lines are sent again; then the run ends "
        "and can be resumed (%(default)g)",
    )
    server = parser.add_argument_group("server, in place of an engine in this process")
    add_connection_arguments(
        server,
        address=None,
        address_help="the HTTP port of a running server, such as http://localhost:8000 (--http-port of serve)",
        timeout_s=_TIMEOUT_S,
    )
    add_token_argument(server)
    add_engine_arguments(parser, *_SERVER_OPTIONS)
    parser.set_defaults(run=_batch)


@dataclass(slots=True)
class _Job:
    """Holds the parsed command line of a run."""

    arguments: argparse.Namespace
    template: Template
    source: Source
    records: Iterator[Record]

    def open_output(self, **settings: Any) -> AnyOutput:
        """Opens the output, whose lines answer the records that are skipped. `settings` is all that answers depend
        on apart from the template.

        Raises `OutputRefused`, or `ConfigurationError` if every line would be refused.
        """
        from kestrel_grpc.cli.batch.lines import Line, open_source
        from kestrel_grpc.cli.batch.output import Output, RetriedOutput, StreamOutput

        given, template, path = self.arguments, self.template, Path(self.arguments.output)
        self._require_fields()
        if given.output == _STANDARD_OUTPUT:
            return StreamOutput(FileIO(os.dup(sys.stdout.fileno()), "w"))
        if path.exists() and not path.is_file():
            return StreamOutput(FileIO(path, "w"))
        if given.retry_failed:
            ids = (Line.read(record, template).id for record in open_source(given.input))
            retried = RetriedOutput(path, ids)
            self.records = (record for record in self.records if record.number in retried.failed)
            return retried
        known = {"skill": template.skill, "field": template.fields, "seed": template.seed, **settings}
        output = Output(path, known, resumes=given.resume, replaces=given.force)
        output.skip_answered(self.records)
        return output

    def write_data_sets(self) -> None:
        """Writes the boxes of the complete output in the forms that are asked for. Raises OSError."""
        from kestrel_grpc.cli.batch.data_sets import DataSet, write_coco, write_yolo
        from kestrel_grpc.cli.batch.lines import PictureFolder

        given, source = self.arguments, self.source
        if not isinstance(source, PictureFolder):
            return
        for target, write in ((given.coco, write_coco), (given.yolo, write_yolo)):
            if target is None:
                continue
            data_set = DataSet(given.input, source.names, _wanted(self.template))
            write(target, data_set, Path(given.output))
            if data_set.num_left_out:
                print_error(f"{target}: {data_set.num_left_out} pictures are left out, which have no answer")

    def _require_fields(self) -> None:
        from kestrel_grpc.cli.batch.lines import fields_missing_in_all, open_source

        path = self.arguments.input
        if not _can_be_read_again(path):
            return
        ways = {"skill": "; give --skill", "image": ""}
        missing = fields_missing_in_all(open_source(path), self.template)
        if missing:
            raise ConfigurationError(
                tuple(
                    f"{path}: every line lacks {name}{ways.get(name, f'; give --field {name}=…')}"
                    for name in missing
                )
            )


def _batch(arguments: argparse.Namespace) -> int:
    from kestrel_grpc.cli.batch.lines import InputUnusable, Template, fields_of, open_source
    from kestrel_grpc.cli.batch.output import OutputRefused

    try:
        template = Template(
            arguments.skill, fields_of(arguments.field), arguments.seed, arguments.input.absolute().parent
        )
        _require_consistent(arguments)
        source = open_source(arguments.input)
        _require_data_set(arguments, template, source)
        job = _Job(arguments, template, source, iter(source))
        return _with_engine(job) if arguments.address is None else _with_server(job)
    except ConfigurationError as error:
        return refuse(error)
    except (InputUnusable, OutputRefused, ValueError) as error:
        print_error(str(error))
        return _MISUSED
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return _MISUSED


def _wanted(template: Template) -> list[str]:
    """Returns the objects that all lines look for."""
    several = template.fields.get("objects")
    given = several if isinstance(several, list) else [template.fields.get("object")]
    return list(dict.fromkeys(name for name in given if isinstance(name, str)))


def _require_data_set(arguments: argparse.Namespace, template: Template, source: Source) -> None:
    """Raises `ConfigurationError` if the boxes of this run make no data set, or it cannot be written."""
    from kestrel_grpc.cli.batch.data_sets import with_same_labels
    from kestrel_grpc.cli.batch.lines import PictureFolder

    coco, yolo, output = arguments.coco, arguments.yolo, Path(arguments.output)
    flags = [flag_name(name) for name in ("coco", "yolo") if getattr(arguments, name) is not None]
    if not flags:
        return
    problems: list[str] = []
    if not isinstance(source, PictureFolder):
        problems.append("IN must be a folder of pictures")
    if template.skill != "detect" or not _wanted(template):
        problems.append("needs --skill detect, and --field object=… or objects=[…]")
    if arguments.output == _STANDARD_OUTPUT or (output.exists() and not output.is_file()):
        problems.append("OUT must be a file, which is read again")
    if coco is not None:
        files = [output, *(output.with_name(f"{output.name}.{suffix}") for suffix in ("resume", "retry"))]
        if coco.resolve() in [file.resolve() for file in files]:
            problems.append(f"{coco} is a file of OUT")
        if not coco.absolute().parent.is_dir():
            problems.append(f"{coco.absolute().parent} is no folder")
        elif not _may_be_written(coco):
            problems.append(f"{coco} cannot be written")
    if yolo is not None:
        if not all(map(_may_be_written, (yolo / "data.yaml", yolo / "labels" / "any.txt"))):
            problems.append(f"{yolo} is no folder that can be written to")
        if isinstance(source, PictureFolder) and (same := with_same_labels(source.names)) is not None:
            problems.append(f"{same[0]} and {same[1]} would have the same file of labels; rename one")
    if problems:
        raise ConfigurationError(tuple(f"{' and '.join(flags)}: {problem}" for problem in problems))


def _may_be_written(file: Path) -> bool:
    """Returns True if it seems that the file can be written, and the folders around it be made."""
    if file.exists():
        return not file.is_dir() and os.access(file, os.W_OK)
    folder = next(folder for folder in file.absolute().parents if folder.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


def _can_be_read_again(path: Path) -> bool:
    return path.is_dir() or path.is_file()


def _require_consistent(arguments: argparse.Namespace) -> None:
    """Raises `ConfigurationError` if the arguments exclude each other."""
    from kestrel_grpc.frontends.http.endpoint import MAX_TIMEOUT_S

    problems: list[str] = []
    names = ("resume", "force", "retry_failed")
    ways = [flag_name(name) for name in names if getattr(arguments, name)]
    if len(ways) > 1:
        problems.append(f"{' and '.join(ways)}: give one of them")
    path = Path(arguments.output)
    if arguments.output == _STANDARD_OUTPUT or (path.exists() and not path.is_file()):
        if path.is_dir() and arguments.output != _STANDARD_OUTPUT:
            problems.append(f"{path}: is a folder; OUT is a file")
        problems += [f"{way}: OUT is no file that a run can go on with" for way in ways]
    elif path.exists() and path.samefile(arguments.input):
        problems.append("OUT must not be IN")
    if arguments.retry_failed and not _can_be_read_again(arguments.input):
        problems.append("--retry-failed: IN must be a file or a folder, which is read twice")
    if not 0.0 < arguments.timeout <= MAX_TIMEOUT_S:
        problems.append(f"--timeout: must be above 0 and at most {MAX_TIMEOUT_S:g}")
    if arguments.address is not None:
        given = [name for name in option_names() if getattr(arguments, name, None) is not None]
        problems += [f"{flag_name(name)}: is set by the server at --address" for name in given]
    if problems:
        raise ConfigurationError(tuple(problems))


def _with_server(job: _Job) -> int:
    """Runs with the server at `--address`; returns the exit status."""
    from kestrel_grpc.cli.batch.callers import RunEnded, ServerAddress, ServerCaller, Unreachable

    arguments = job.arguments
    address: ServerAddress = ServerAddress.parse(arguments.address, tls_of(arguments))
    num_in_flight = arguments.in_flight or IN_FLIGHT_OF_SERVER

    async def run(output: AnyOutput) -> int:
        caller = ServerCaller(address, arguments.token, timeout_s=arguments.timeout, num_connections=num_in_flight)
        try:
            await caller.check()
            return await _run(job, caller, output, num_in_flight)
        except (Unreachable, RunEnded) as error:
            print_error(f"{arguments.address}: {error}")
            return _FAILED
        finally:
            caller.close()

    with closing(job.open_output()) as output, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run(output))


def _with_engine(job: _Job) -> int:
    """Runs with an engine of this process; returns the exit status."""
    config = ServerConfig.parse(vars(job.arguments), os.environ)
    if config.devices is not None or config.frontends not in (0, "auto"):
        raise ConfigurationError(
            ("--devices and --frontends: start a server with them, and give its HTTP port as --address",)
        )
    require_engine()
    set_up_logging(config.log_level, line_format=config.log_format)
    # The engine's libraries take seconds to import: all checks that do not need them precede the import.
    from kestrel_grpc.images.image_uris import RemoteImagesUnavailable
    from kestrel_grpc.requirements import image_source, require_usable_engine

    try:
        require_usable_engine(config)
        images = image_source(config)
    except RemoteImagesUnavailable as error:
        print_error(str(error))
        return _FAILED
    engine = config.engine_config()
    formats = [config.precision, engine.dtype, engine.text_backend, engine.vision_backend]
    with closing(job.open_output(model=[engine.model, engine.revision], formats=formats)) as output:
        return _run_engine(job, config, images, output)


def _run_engine(job: _Job, config: ServerConfig, images: ImageSource, output: AnyOutput) -> int:
    """Loads the model and runs; returns the exit status."""
    from kestrel_grpc.cli.batch.callers import EngineCaller
    from kestrel_runtime.api.engine import EngineStatus
    from kestrel_runtime.api.errors import CheckpointError
    from kestrel_runtime.engine.engine import LocalEngine
    from kestrel_runtime.engine.warm_up import WarmUpFailed, warm_up

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_descriptor_limit()
    return_large_blocks()
    try:
        engine = LocalEngine.start(config.engine_config())
    except CheckpointError as error:
        print_error(str(error))
        return _FAILED
    _log.info("%s", config.precision_line())
    engine.on_status_change(lambda now: end_within(END_TIMEOUT_S) if now is EngineStatus.DEAD else None)
    num_in_flight = job.arguments.in_flight or _IN_FLIGHT_PER_BATCH * engine.info.max_batch_size

    async def run() -> int:
        await warm_up(engine)
        freeze_existing_objects()
        caller = EngineCaller(engine, config, images, timeout_s=job.arguments.timeout)
        try:
            return await _run(job, caller, output, num_in_flight)
        finally:
            await images.close()

    status = _FAILED
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            status = runner.run(run())
    except WarmUpFailed as error:
        print_error(str(error))
    finally:
        engine.close()
        if not engine.has_ended:
            end_now(status)
    return status


async def _run(job: _Job, caller: Caller, output: AnyOutput, num_in_flight: int) -> int:
    """Runs until the end of the input, a signal or a failure; returns the exit status."""
    from kestrel_grpc.cli.batch.callers import RunEnded
    from kestrel_grpc.cli.batch.lines import InputUnusable
    from kestrel_grpc.cli.batch.output import Output
    from kestrel_grpc.cli.batch.run import Progress, Run

    arguments = job.arguments
    run = Run(
        job.records,
        output,
        caller,
        job.template,
        num_in_flight=num_in_flight,
        max_retry_s=arguments.max_retry,
        on_first_failure=lambda reason: progress.say(reason),
    )
    progress = Progress(run, job.source, output)
    again = "the same command with --resume goes on"
    if not isinstance(output, Output):
        again = "the lines that are written stay"
    with stop_signals() as signals:
        signals.first.add_done_callback(lambda _: run.stop())
        signals.second.add_done_callback(lambda number: end_now(_BY_SIGNAL + number.result()))
        try:
            if arguments.progress or sys.stderr.isatty():
                with progress.shown():
                    is_complete = await run.run()
            else:
                is_complete = await run.run()
            if is_complete:
                output.finish()
                again = "all lines are written; the same command with --retry-failed writes the data set, too"
                job.write_data_sets()
            print_error(progress.line())
        except BrokenPipeError:  # the reader of OUT has closed it, as `head` does
            return _FAILED
        except (RunEnded, InputUnusable, OSError) as error:
            print_error(f"stopped: {error}; {again}")
            return _FAILED
        if is_complete:
            return _FAILED if output.num_failures else 0
        number = signals.first.result()
        print_error(f"stopped by {signal.Signals(number).name}; {again}")
        return _BY_SIGNAL + number


def _whole_number(least: int, most: int) -> Any:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError("must be a number of seconds")
    return seconds
