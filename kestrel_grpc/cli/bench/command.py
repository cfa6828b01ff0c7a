"""Implements `kestrel-grpc bench`: loads a running server, measures its answers, and compares two results.

`workload.py` makes the questions, `calls.py` and `http.py` send them over one of the APIs, `processes.py` keeps up
the load, `numbers.py` computes rates and percentiles, and `report.py` and `page.py` show them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel_grpc.cli.common import add_connection_arguments, add_token_argument, explain, show, tls_of
from kestrel_grpc.cli.conditions import http_server_facts, server_facts
from kestrel_grpc.process.machine import machine_facts
from kestrel_grpc.process.signals import Interruption
from kestrel_grpc.process.terminal import print_error

if TYPE_CHECKING:
    from kestrel_grpc.cli.bench.calls import Target
    from kestrel_grpc.cli.bench.numbers import Objective
    from kestrel_grpc.cli.bench.processes import LoadProcesses, Recording
    from kestrel_grpc.cli.bench.workload import Workload

APIS = ("grpc", "rest", "openai", "triton")
SKILLS = ("query", "caption", "point", "detect", "segment")
_FAILED, _MISUSED = 1, 2
_DURATION_S, _WARM_UP_S, _TIMEOUT_S = 30.0, 10.0, 120.0
_CONCURRENCY = 8
_SKILL = "query"
_MAX_TOKENS = 64
_BY_SIGNAL = 128
_WAIT_LIMIT_S = 10.0
"""The wait for answers after the last request of a window in an open loop, in seconds."""
_CHECK_TIMEOUT_S = 30.0
_REQUESTS_PER_S = 100_000
"""An upper bound of the requests that a run sends in a second."""


def add_bench_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "bench",
        help="load a running server and measure its answers, or compare two results",
        description="Load a running server and print rates, times and errors. `bench compare A.json B.json` "
        "compares two results. Exit 0 if every request was answered, 1 if some failed or none could be sent, 2 for "
        "a mistake in the call. Ctrl-C (SIGINT) or SIGTERM ends the measurement and shows what has been measured, "
        "with exit 130 or 143; a second Ctrl-C ends the command at once.",
        usage="%(prog)s [OPTION ...]\n       %(prog)s compare A.json B.json",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_bench)
    actions = parser.add_subparsers(metavar="ACTION", required=False, prog=parser.prog)
    compare = actions.add_parser(
        "compare",
        help="compare two results",
        description="Print the numbers of two results of --json side by side, their ratios, and which of them are "
        "within the noise of the runs.",
    )
    compare.add_argument("first", metavar="A.json", type=Path, help="a result")
    compare.add_argument("second", metavar="B.json", type=Path, help="the result to compare with it")
    compare.set_defaults(run=_compare)

    parser.add_argument("--api", choices=APIS, default="grpc", help="how requests are sent (%(default)s)")
    _add_workload(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    output = parser.add_argument_group("results")
    output.add_argument(
        "--slo",
        metavar="NAME=MS,…",
        type=_objective,
        help="count the requests whose times are within bounds, in milliseconds: first_token_ms, per_token_ms and "
        "total_ms, such as first_token_ms=500,per_token_ms=50",
    )
    output.add_argument("--json", metavar="FILE", type=Path, help="write the result as JSON")
    output.add_argument("--html", metavar="FILE", type=Path, help="write the result as a page with plots")
    server = parser.add_argument_group("server")
    add_connection_arguments(
        server,
        address=None,
        address_help="of a running server: the gRPC port (localhost:50051, or KESTREL_GRPC_ADDRESS), and with "
        "--api rest or openai the HTTP port (http://localhost:8000)",
        timeout_s=_TIMEOUT_S,
    )
    add_token_argument(server)


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--skill", choices=SKILLS, help=f"the skill that is called ({_SKILL})")
    group.add_argument(
        "--text",
        metavar="TEXT",
        action="append",
        help="the question of a query, or what to point at, to detect or to segment; may be repeated, to be asked "
        "in turn (questions about drawn charts, or `bar`)",
    )
    group.add_argument(
        "--pictures",
        metavar="PATH",
        type=Path,
        help="an image file, or a folder of them to be shown in turn (drawn charts of 800 by 557 pixels)",
    )
    group.add_argument(
        "--num-pictures",
        metavar="N",
        type=_whole(0),
        help="so many different charts, in turn; 0 asks without a picture (a chart of its own for each request, "
        "which no cache has)",
    )
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=_whole(1),
        default=_MAX_TOKENS,
        help="longest answer, in tokens (%(default)s)",
    )
    group.add_argument(
        "--temperature",
        metavar="T",
        type=_positive(0.0),
        default=0.0,
        help="of sampling; 0 is greedy (%(default)g)",
    )
    group.add_argument(
        "--adapter",
        metavar="NAME",
        action="append",
        default=[],
        help="an adapter (LoRA) that requests name; may be repeated, to be named in turn",
    )
    group.add_argument("--whole", action="store_true", help="ask for whole answers, not for streams")
    group.add_argument(
        "--tell-pictures",
        action="store_true",
        help="over gRPC, name the SHA-256 of each picture in the metadata, by which Envoy selects a server",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        metavar="N",
        type=_whole(1),
        help=f"closed loop: keep so many requests running ({_CONCURRENCY})",
    )
    load.add_argument(
        "--rate",
        metavar="PER_S",
        type=_positive(),
        help="open loop: send so many requests per second, at random moments (a Poisson process)",
    )
    load.add_argument(
        "--ramp",
        metavar="FIRST:LAST",
        type=_ramp(_whole(1)),
        help="closed loop in steps, each with twice as many, such as 1:64",
    )
    load.add_argument(
        "--rate-ramp",
        metavar="FIRST:LAST",
        type=_ramp(_positive()),
        help="open loop in steps, each at twice the rate, such as 0.5:8",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--duration",
        metavar="SECONDS",
        type=_positive(),
        default=_DURATION_S,
        help="how long each step is measured (%(default)g)",
    )
    length.add_argument(
        "-n", "--requests", metavar="N", type=_whole(1), help="requests of each step, in place of a duration"
    )
    group.add_argument(
        "--warm-up",
        metavar="SECONDS",
        type=_positive(0.0),
        default=_WARM_UP_S,
        help="before each step, ask until every caller has had an answer, at most so long (%(default)g)",
    )
    group.add_argument(
        "--processes",
        metavar="N",
        type=_whole(1),
        default=min(4, max(1, (os.cpu_count() or 1) // 4)),
        help="processes that send requests (a quarter of the cores, at most 4; here %(default)s)",
    )
    group.add_argument(
        "--seed", metavar="N", type=_whole(0), default=0, help="of the random moments of an open loop (%(default)s)"
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Describes one load: a number of requests at a time, or a number per second."""

    concurrency: int | None
    rate_per_s: float | None

    def record(self, load: LoadProcesses[None], arguments: argparse.Namespace) -> Recording:
        """Loads the server, and returns the recording."""
        if self.concurrency is not None:
            if arguments.requests is None:
                return load.closed(None, self.concurrency, arguments.duration, arguments.warm_up)
            return load.counted(None, self.concurrency, arguments.requests, arguments.warm_up)
        assert self.rate_per_s is not None
        wait_limit_s = min(_WAIT_LIMIT_S, arguments.timeout)
        return load.open(
            None,
            self.rate_per_s,
            arguments.duration,
            wait_limit_s,
            num_requests=arguments.requests,
            seed=arguments.seed,
            warm_up_s=arguments.warm_up,
        )

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate_per_s is None else f"{self.rate_per_s:g} sent/s"


def steps_of(arguments: argparse.Namespace) -> list[Step]:
    """Returns the steps that the arguments ask for."""
    if arguments.rate is not None:
        return [Step(None, arguments.rate)]
    if arguments.rate_ramp is not None:
        return [Step(None, rate) for rate in _doubled(*arguments.rate_ramp)]
    if arguments.ramp is not None:
        return [Step(int(count), None) for count in _doubled(*arguments.ramp)]
    return [Step(arguments.concurrency or _CONCURRENCY, None)]


def _doubled(first: float, last: float) -> Iterator[float]:
    """Yields the first number, its doubles below the last, and the last."""
    value = first
    while value < last:
        yield value
        value *= 2
    yield last


def _bench(arguments: argparse.Namespace) -> int:
    from kestrel_client.errors import KestrelClientError
    from kestrel_grpc.cli.bench.numbers import Objective
    from kestrel_grpc.cli.bench.processes import LoadFailed
    from kestrel_grpc.cli.bench.report import document

    arguments.skill = arguments.skill or _SKILL
    try:
        workload = _workload(arguments)
        asked = workload.facts()
        target, server = _target(arguments)
    except ValueError as error:
        print_error(str(error))
        return _MISUSED
    except (KestrelClientError, OSError) as error:
        print_error(f"{arguments.address or 'the server'}: {explain(error)}")
        return _FAILED
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    steps = steps_of(arguments)
    with Interruption() as interruption:
        try:
            recordings = list(_recordings(steps, target, workload, arguments, interruption))
        except LoadFailed as error:
            print_error(str(error))
            return _FAILED
        objective = arguments.slo or Objective()
        found = [_measured(*measured, objective) for measured in zip(steps, recordings, strict=False)]
        if arguments.api == "triton":  # its answers do not say what was cached
            found = [{**step, "total_cached_tokens": None} for step in found]
        by_signal = interruption.number
        if by_signal is not None:
            print_error(f"ended by {by_signal.name}" + ("" if found else " before anything was measured"))
        if found:
            is_complete = len(found) == len(steps) and not recordings[-1].is_partial
            options = _options(arguments, target)
            conditions = {"client": dict(machine_facts()), "server": server, "asked": asked}
            result = document(options, date, target.model, conditions, found, is_complete=is_complete)
            try:
                _show(result, arguments)
            except OSError as error:
                print_error(explain(error))
                return _FAILED
    if by_signal is not None:
        return _BY_SIGNAL + by_signal
    return _FAILED if any(step["failed"] or not step["completed"] for step in found) else 0


def _recordings(
    steps: Sequence[Step],
    target: Target,
    workload: Workload,
    arguments: argparse.Namespace,
    interruption: Interruption,
) -> Iterator[Recording]:
    """Yields the recordings of the steps, until an interruption. Raises `LoadFailed`."""
    from kestrel_grpc.cli.bench.processes import EndedEarly, LoadProcesses
    from kestrel_grpc.cli.bench.progress import Progress

    progress = Progress(len(steps), arguments.duration, arguments.requests)

    def is_ended() -> bool:
        if interruption.number is None:
            return False
        progress.close()
        print_error("ending the measurement; a second Ctrl-C ends the command at once, without a result")
        return True

    try:
        with LoadProcesses(
            target,
            workload,
            arguments.processes,
            # Drawn files contain these numbers: if they were the same, a second run would find the files cached.
            first_number=int(time.time()) * _REQUESTS_PER_S,
            timeout_s=arguments.timeout,
            watch=progress.show,
            is_ended=is_ended,
        ) as load:
            for step in steps:
                progress.begin(str(step))
                recording = step.record(load, arguments)
                yield recording
                if recording.is_partial:
                    return
    except EndedEarly:
        return
    finally:
        progress.close()


def _show(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Prints the result and writes the files. Raises OSError."""
    from kestrel_grpc.cli.bench.report import text

    show(text(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.html is not None:
        from kestrel_grpc.cli.bench.page import page

        arguments.html.write_text(page(result), encoding="utf-8")


def _measured(step: Step, recording: Recording, objective: Objective) -> dict[str, Any]:
    from kestrel_grpc.cli.bench.numbers import numbers

    is_open = step.rate_per_s is not None
    load = {"max_concurrency": step.concurrency, "request_rate": step.rate_per_s if is_open else "inf"}
    return load | numbers(recording, objective, is_open=is_open)


def _workload(arguments: argparse.Namespace) -> Workload:
    """Returns the workload. Raises ValueError for arguments that exclude each other, OSError for unreadable
    pictures."""
    from kestrel_grpc.cli.bench.workload import OBJECTS, QUESTIONS, TEXT_QUESTIONS, Workload, picture_files

    problems: list[str] = []
    has_picture = arguments.num_pictures != 0
    if arguments.pictures is not None and arguments.num_pictures is not None:
        problems.append("--pictures and --num-pictures: give one of them")
    if not has_picture and arguments.skill != "query":
        problems.append(f"--num-pictures 0: a {arguments.skill} needs a picture")
    if arguments.skill == "caption" and arguments.text:
        problems.append("--text: a caption has none")
    if arguments.api == "openai" and arguments.skill != "query":
        problems.append("--skill: OpenAI's API has queries alone")
    if arguments.api != "grpc" and arguments.tell_pictures:
        problems.append("--tell-pictures: needs --api grpc")
    if arguments.api == "triton" and arguments.adapter:
        problems.append("--adapter: Triton's API has none")
    for name in ("json", "html"):
        file: Path | None = getattr(arguments, name)
        if file is not None and not file.absolute().parent.is_dir():
            problems.append(f"--{name}: {file.absolute().parent} is no folder")
    if problems:
        raise ValueError("; ".join(problems))
    if arguments.pictures is not None:
        picture_files(arguments.pictures)
    texts = {"query": QUESTIONS if has_picture else TEXT_QUESTIONS, "caption": ()}.get(arguments.skill, OBJECTS)
    return Workload(
        skill=arguments.skill,
        texts=tuple(arguments.text or texts),
        pictures=arguments.pictures,
        num_pictures=arguments.num_pictures,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        is_streamed=not arguments.whole,
        adapters=tuple(arguments.adapter),
        sends_digests=arguments.tell_pictures,
    )


def _target(arguments: argparse.Namespace) -> tuple[Target, dict[str, Any] | None]:
    """Returns the server, which has answered a first question, and what it says about itself; None if it does not.

    Raises the errors of a client, or ValueError.
    """
    from kestrel_client import Client
    from kestrel_client.connection import address_of
    from kestrel_grpc.cli.bench.calls import Target

    tls = tls_of(arguments)
    if arguments.api in ("rest", "openai"):
        address = arguments.address or "http://localhost:8000"
        model, server = _server_over_http(address, tls, arguments.token)
        return Target(arguments.api, address, arguments.token, tls, model), server
    address = address_of(arguments.address)
    with Client(
        address,
        timeout_s=min(arguments.timeout, _CHECK_TIMEOUT_S),
        token=arguments.token,
        tls_ca=arguments.tls_ca,
        tls_client_certificate=arguments.tls_client_certificate,
        tls_client_key=arguments.tls_client_key,
    ) as client:
        server = server_facts(client)
    model = "" if server is None else server["model"]
    return Target(arguments.api, address, arguments.token, tls, model), server


def _server_over_http(address: str, tls: Any, token: str | None) -> tuple[str, dict[str, Any] | None]:
    """Returns the name of the model, and what the server says about itself. Raises ValueError or OSError."""
    from http.client import HTTPException

    from kestrel_grpc.cli.batch.callers import ServerAddress

    server = ServerAddress.parse(address, tls)
    connection = server.connect(_CHECK_TIMEOUT_S)
    headers = {"authorization": f"Bearer {token}"} if token else {}

    def get(path: str) -> tuple[int, bytes]:
        connection.request("GET", f"{server.prefix}{path}", headers=headers)
        response = connection.getresponse()
        return response.status, response.read()

    try:
        status, body = get("/v1/models")
        if status in (401, 403):
            raise ConnectionError("the server asks for a token, or does not know the one of --token")
        model = json.loads(body)["data"][0]["id"]
        status, body = get("/v1/server")
        return model, http_server_facts(json.loads(body)) if status == 200 else None
    except (HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConnectionError("is not the HTTP port of a server (--http-port of serve)") from error
    finally:
        connection.close()


def _options(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Returns the arguments of the run, without secrets and without the files of results."""
    hidden = {"command", "run", "token", "json", "html"}
    found = {name: value for name, value in vars(arguments).items() if name not in hidden and value is not None}
    found["address"] = target.address
    if arguments.requests is not None:
        del found["duration"]
    return {name: str(value) if not isinstance(value, _PLAIN) else value for name, value in found.items()}


_PLAIN = (bool, int, float, list, tuple)


def _compare(arguments: argparse.Namespace) -> int:
    from kestrel_grpc.cli.bench.report import Unreadable, comparison, read

    try:
        show(comparison(read(arguments.first), read(arguments.second)))
    except (Unreadable, OSError) as error:
        print_error(explain(error))
        return _MISUSED
    return 0


def _objective(text: str) -> Objective:
    from kestrel_grpc.cli.bench.numbers import Objective

    try:
        return Objective.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least}")
        return int(text)

    return parse


def _positive(least: float | None = None) -> Callable[[str], float]:
    """Returns a parser of numbers above 0, or from `least` on."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0.0 if least is None else value >= least) or math.isinf(value):
            bound = "above 0" if least is None else f"from {least:g}"
            raise argparse.ArgumentTypeError(f"must be a number {bound}")
        return value

    return parse


def _ramp(part: Callable[[str], float]) -> Callable[[str], tuple[float, float]]:
    def parse(text: str) -> tuple[float, float]:
        first, separator, last = text.partition(":")
        if not separator:
            raise argparse.ArgumentTypeError("must be FIRST:LAST, such as 1:64")
        bounds = part(first), part(last)
        if bounds[0] >= bounds[1]:
            raise argparse.ArgumentTypeError("must begin below its end, as 1:64 does")
        return bounds

    return parse
