"""An engine in the process of a tool: its options, requests in a closed loop, and methods that are wrapped."""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kestrel_runtime
from bench.harness.checkpoints import write_endless
from kestrel_grpc.config.options import ConfigurationError, ServerConfig, named_values
from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Request
from kestrel_runtime.engine.engine import LocalEngine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, and how it is to be computed."""
    parser.add_argument(
        "--model", default=BUILT_IN_MODEL, help="the built-in one or a checkpoint folder (%(default)s)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="%(default)s")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="%(default)s"
    )
    parser.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="an option of `kestrel-grpc serve` that says how the engine computes, such as text-backend=fused; "
        "may be repeated",
    )


def engine_config(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> EngineConfig:
    """The engine that the options ask for; ends the program with a complaint where they make no sense."""
    own = {"model": arguments.model, "device": arguments.device, "dtype": arguments.dtype}
    try:
        return ServerConfig.parse({**named_values(arguments.set), **own}, {}).engine_config()
    except ConfigurationError as error:
        parser.error(str(error))


@contextlib.contextmanager
def endless(config: EngineConfig) -> Iterator[EngineConfig]:
    """The same engine where it has a checkpoint; instead of the built-in model a copy that never ends an answer."""
    if config.model != BUILT_IN_MODEL:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "nano-endless"
        write_endless(Path(kestrel_runtime.__path__[0]) / "nano", target)
        yield replace(config, model=str(target))


Answered = Callable[[int, "Finished | KestrelError"], None]


async def closed_loop(
    engine: LocalEngine, requests: Iterable[Request], num_at_once: int, answered: Answered
) -> None:
    """Ask all of `requests`, `num_at_once` at a time; `answered` is called with each request's index and result."""
    queue = enumerate(requests)

    async def caller() -> None:
        for number, request in queue:
            try:
                answered(number, await engine.submit(request).result())
            except KestrelError as error:
                answered(number, error)

    await asyncio.gather(*(caller() for _ in range(num_at_once)))


Method = Callable[..., Any]


@contextlib.contextmanager
def wrapped(owner: type, name: str, wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Until the block ends, calls of `owner`'s method `name` go to what `wrap` makes of it."""
    own = vars(owner)[name]
    setattr(owner, name, wrap(own))
    try:
        yield
    finally:
        setattr(owner, name, own)
