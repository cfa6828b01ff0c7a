"""Implements `kestrel-grpc demo`: serves the built-in model and calls five skills over gRPC, one with an adapter.

Starts a complete server on a free port, calls it as any client would, and draws the results.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel_grpc.cli.common import require_engine

if TYPE_CHECKING:
    from kestrel_client import AsyncClient, Box, Point

PICTURE = "demo_picture.png"
QUESTIONS = (
    "How many shapes are there?",
    "What color is the star?",
    "What does the text say?",
    "Is there a heart?",
)
OUTLINED = "yellow star"
ADAPTER = "gold"
"""The adapter of the built-in model that calls yellow gold."""
ADAPTED_QUESTION = QUESTIONS[1]


def add_demo_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "demo",
        help="ask the built-in model about a picture",
        description="Serve the built-in model on a free port and ask it over gRPC, once with an adapter.",
    )
    parser.add_argument(
        "--draw",
        metavar="FILE",
        type=Path,
        default=Path("demo.png"),
        help="PNG file to write, with the results drawn on the picture (default: %(default)s)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    require_engine()
    try:
        arguments.draw.touch()  # fails now rather than after all answers
        asyncio.run(_demonstrate(arguments.draw))
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"kestrel-grpc: {arguments.draw}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        if arguments.draw.is_file() and not arguments.draw.stat().st_size:
            arguments.draw.unlink()
    return 0


async def _demonstrate(target: Path) -> None:
    from kestrel_client import AsyncClient
    from kestrel_grpc.config.options import ServerConfig
    from kestrel_grpc.server import Server
    from kestrel_runtime.api.config import EngineConfig
    from kestrel_runtime.engine.engine import LocalEngine

    adapters = files("kestrel_runtime").joinpath("nano", "adapters")
    config = ServerConfig(port=0, engine=EngineConfig(adapters=str(adapters), num_adapter_slots=1))
    engine = await asyncio.to_thread(LocalEngine.start, config.engine_config())
    async with Server(engine, config) as server, AsyncClient(f"127.0.0.1:{server.port}") as client:
        await _ask(client, files("kestrel_grpc").joinpath(PICTURE).read_bytes(), target)


async def _ask(client: AsyncClient, picture: bytes, target: Path) -> None:
    from kestrel_client import draw

    for question in QUESTIONS:
        print(f"\nquery    {question}\n         ", end="", flush=True)
        async for piece in client.query(picture, question, temperature=0.0):
            print(piece, end="", flush=True)
    print(f"\n\nquery    {ADAPTED_QUESTION} (adapter {ADAPTER})\n         ", end="", flush=True)
    async for piece in client.query(picture, ADAPTED_QUESTION, temperature=0.0, adapter=ADAPTER):
        print(piece, end="", flush=True)
    print("\n\ncaption\n         ", end="", flush=True)
    async for piece in client.caption(picture, temperature=0.0):
        print(piece, end="", flush=True)
    pointed = await client.point(picture, "shape")
    print(f"\n\npoint    shape\n         {'  '.join(map(_point_text, pointed.points))}")
    detected = await client.detect(picture, "shape")
    print("\ndetect   shape")
    for item in detected.objects:
        print(f"         {_box_text(item.box)}")
    outlined = await client.segment(picture, OUTLINED)
    print(f"\nsegment  {OUTLINED}")
    for segment in outlined.segments:
        print(f"         {_box_text(segment.box)}  {segment.svg_path}")
    draw(picture, outlined, detected, pointed).save(target, format="PNG")
    print(f"\nAll of it is drawn in {target}.")


def _point_text(point: Point) -> str:
    return f"({point.x:.3f}, {point.y:.3f})"


def _box_text(box: Box) -> str:
    return f"({box.x_min:.3f}, {box.y_min:.3f}) to ({box.x_max:.3f}, {box.y_max:.3f})"
