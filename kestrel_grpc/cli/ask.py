"""The client commands: query, caption, point, detect, segment, gaze, image. Uses `kestrel_client` alone.

Answers go to stdout, text as it arrives. Everything else, including the reasoning, goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kestrel_client import (
    Box,
    CallOptions,
    Client,
    DetectResult,
    GazeResult,
    KestrelClientError,
    Point,
    PointResult,
    Result,
    Segment,
    SegmentResult,
    ServerError,
    StoredImage,
    TextChannel,
    TextDelta,
    draw,
)
from kestrel_client.connection.channel import DEFAULT_TIMEOUT_S, address_of
from kestrel_client.images.inputs import image_bytes, is_on_server
from kestrel_grpc.cli.connection import add_connection_arguments, tls_of

NO_IMAGE = "-"
"""The value of IMAGE for a question without an image."""
IMAGE_HELP = "an image file, its address (https://…), or the name of a stored one (sha256:…)"


def add_client_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands; each sets `run`, which takes the parsed arguments and returns the exit status."""
    query = _add(
        subparsers,
        _query,
        "answer a question",
        f"an image file, its address, the name of a stored one, or {NO_IMAGE} for none",
    )
    query.add_argument("question", metavar="QUESTION")
    query.add_argument(
        "--reasoning", action="store_true", help="let the model reason first, and print its reasoning on stderr"
    )
    caption = _add(subparsers, _caption, "describe an image")
    caption.add_argument("--length", choices=("short", "normal", "long"), help="length of the caption (normal)")
    point = _add(subparsers, _point, "find the place of each object of a kind")
    detect = _add(subparsers, _detect, "find a box around each object of a kind")
    segment = _add(subparsers, _segment, "find the outline of an object")
    for command in (point, detect, segment):
        command.add_argument("object", metavar="OBJECT", help='what to look for, such as "dog"')
        _add_draw(command)
    for command in (point, detect):
        command.add_argument("--max-objects", metavar="N", type=int, help="maximum number of objects to find (150)")
    gaze = _add(subparsers, _gaze, "find the place that somebody in the image looks at")
    for name in ("x", "y"):
        gaze.add_argument(
            f"eye_{name}",
            metavar=name.upper(),
            type=float,
            help=f"{name} of an eye of the one who looks, from 0 to 1",
        )
    _add_draw(gaze)
    _add_image_commands(subparsers)


def _add_image_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    image = subparsers.add_parser("image", help="store, describe or drop an image on the server")
    actions = image.add_subparsers(metavar="ACTION", required=True)
    upload = actions.add_parser(
        "upload", help="store an image, and print its name", description="Store an image, and print its name."
    )
    upload.add_argument("image", metavar="IMAGE", help="an image file")
    upload.add_argument(
        "--ttl", metavar="SECONDS", type=float, help="how long to keep it (as the server is set up)"
    )
    upload.add_argument("--pin", action="store_true", help="keep it even where its memory is needed for others")
    get = actions.add_parser("get", help="describe a stored image", description="Describe a stored image.")
    get.add_argument("--output", metavar="FILE", type=Path, help="write the image to this file as well")
    delete = actions.add_parser("delete", help="drop a stored image", description="Drop a stored image.")
    for parser in (get, delete):
        parser.add_argument("image", metavar="NAME", help="the name of the image, sha256:…")
    for parser, command in ((upload, _upload), (get, _get), (delete, _delete)):
        add_client_arguments(parser)
        parser.set_defaults(run=partial(run_with_client, command))
    for parser in (upload, get):
        parser.add_argument("--json", action="store_true", help="print all about the image as one line of JSON")


Command = Callable[[Client, argparse.Namespace], None]


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    command: Command,
    summary: str,
    image_help: str = IMAGE_HELP,
) -> argparse.ArgumentParser:
    name = command.__name__.removeprefix("_")
    parser = subparsers.add_parser(
        name, help=summary, description=f"{summary.capitalize()}, asking a running server."
    )
    parser.add_argument("image", metavar="IMAGE", help=image_help)
    add_client_arguments(parser)
    parser.add_argument("--temperature", metavar="T", type=float, help="temperature; 0 takes the most likely token")
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="sample from the most likely tokens with a total probability of P",
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, help="maximum number of tokens to generate")
    parser.add_argument(
        "--seed", metavar="N", type=int, help="seed of the sampling, for the same tokens every time"
    )
    parser.add_argument("--adapter", metavar="NAME", help="adapter (LoRA) to use, such as name or name@step")
    parser.add_argument("--json", action="store_true", help="print the whole result as one line of JSON")
    parser.set_defaults(run=partial(run_with_client, command))
    return parser


def _add_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draw", metavar="FILE", type=Path, help="write a PNG of the image with the result drawn on it"
    )


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `run_with_client` reads."""
    add_connection_arguments(
        parser,
        address=address_of(None),
        address_help="where the server is (%(default)s; KESTREL_GRPC_ADDRESS sets another default)",
        timeout_s=DEFAULT_TIMEOUT_S,
    )
    parser.add_argument(
        "--token",
        default=os.environ.get("KESTREL_GRPC_TOKEN") or None,
        help="API token, for servers that require one (KESTREL_GRPC_TOKEN, which other users here cannot see)",
    )


def run_with_client(command: Command, arguments: argparse.Namespace) -> int:
    """Run a command with a client of the server that the flags name; returns the exit status."""
    try:
        tls_of(arguments)  # refuses a variable that has its former name
        with Client(
            arguments.address,
            timeout_s=arguments.timeout,
            token=arguments.token,
            tls_ca=arguments.tls_ca,
            tls_client_certificate=arguments.tls_client_certificate,
            tls_client_key=arguments.tls_client_key,
        ) as client:
            command(client, arguments)
    except BrokenPipeError:
        # The reader of stdout has closed it; without this, Python reports another error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KestrelClientError, OSError, ValueError) as error:  # a number too large for its field is a ValueError
        print(f"kestrel-grpc: {_explain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _query(client: Client, arguments: argparse.Namespace) -> None:
    image = None if arguments.image == NO_IMAGE else arguments.image
    reasoning = arguments.reasoning or None
    options = _options(arguments)
    if arguments.json:
        _print_json(client.complete_query(image, arguments.question, reasoning=reasoning, **options))
        return
    with client.query(image, arguments.question, reasoning=reasoning, **options) as stream:
        _print_text(stream.deltas())


def _caption(client: Client, arguments: argparse.Namespace) -> None:
    options = _options(arguments)
    if arguments.json:
        _print_json(client.complete_caption(arguments.image, length=arguments.length, **options))
        return
    with client.caption(arguments.image, length=arguments.length, **options) as stream:
        _print_text(stream.deltas())


def _point(client: Client, arguments: argparse.Namespace) -> None:
    image = _image(arguments)
    options = _options(arguments)
    result = client.point(image, arguments.object, max_objects=arguments.max_objects, **options)
    _print_found(arguments, result, [_numbers(point) for point in result.points])
    _draw(arguments, image, result)


def _detect(client: Client, arguments: argparse.Namespace) -> None:
    image = _image(arguments)
    options = _options(arguments)
    result = client.detect(image, arguments.object, max_objects=arguments.max_objects, **options)
    boxes = tuple(item.box for item in result.objects)
    _print_found(arguments, result, [_numbers(box) for box in boxes])
    _draw(arguments, image, result)


def _segment(client: Client, arguments: argparse.Namespace) -> None:
    image, options = _image(arguments), _options(arguments)
    if arguments.json:
        result = client.segment(image, arguments.object, **options)
        _print_json(result)
    else:
        with client.stream_segment(image, arguments.object, **options) as stream:
            _print_outline(stream)
            result = stream.result()
        if not result.segments:
            _print_nothing_found(arguments.object)
        elif result.segments[0].is_partial:
            print("kestrel-grpc: the outline is not complete", file=sys.stderr)
    _draw(arguments, image, result)


def _gaze(client: Client, arguments: argparse.Namespace) -> None:
    image = _image(arguments)
    result = client.gaze(image, Point(arguments.eye_x, arguments.eye_y), **_options(arguments))
    points = () if result.target is None else (result.target,)
    _print_found(arguments, result, [_numbers(point) for point in points], "target")
    _draw(arguments, image, result)


def _upload(client: Client, arguments: argparse.Namespace) -> None:
    image = client.upload_image(arguments.image, ttl_s=arguments.ttl, pin=arguments.pin)
    _print_image(image, arguments, image.image_id)


def _get(client: Client, arguments: argparse.Namespace) -> None:
    image = client.get_image(arguments.image)
    if arguments.output is not None:
        arguments.output.write_bytes(client.read_image(arguments.image))
    pinned = ", pinned" if image.pinned else ""
    size = f"{image.width_px}x{image.height_px}, {image.size_bytes} bytes"
    _print_image(image, arguments, f"{image.media_type}, {size}, until {image.expires:%Y-%m-%dT%H:%M:%SZ}{pinned}")


def _delete(client: Client, arguments: argparse.Namespace) -> None:
    client.delete_image(arguments.image)


def _print_image(image: StoredImage, arguments: argparse.Namespace, line: str) -> None:
    print(json.dumps(dataclasses.asdict(image), default=str) if arguments.json else line)


def _image(arguments: argparse.Namespace) -> bytes | str:
    """The bytes of an image file, which drawing needs too, or the address or name of an image for the server."""
    if not is_on_server(arguments.image):
        return image_bytes(arguments.image)
    if arguments.draw is not None:
        raise ValueError("--draw needs an image file")
    return arguments.image


def _options(arguments: argparse.Namespace) -> CallOptions:
    return CallOptions(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        adapter=arguments.adapter,
    )


def _print_text(deltas: Iterator[TextDelta]) -> None:
    channel = None
    for delta in deltas:
        if channel is TextChannel.REASONING and delta.channel is not channel:
            print(file=sys.stderr)
        channel = delta.channel
        file = sys.stdout if channel is TextChannel.ANSWER else sys.stderr
        print(delta.text, end="", file=file, flush=True)
    print(flush=True)


def _print_outline(segments: Iterator[Segment]) -> None:
    """One line: the box, and the path as it grows."""
    shown: str | None = None
    for segment in segments:
        new = f"{_numbers(segment.box)} " if shown is None else segment.svg_path[len(shown) :]
        shown = segment.svg_path
        print(new, end="", flush=True)
    if shown is not None:
        print(flush=True)


def _print_found(
    arguments: argparse.Namespace, result: Result, lines: list[str], object: str | None = None
) -> None:
    if arguments.json:
        _print_json(result)
        return
    for line in lines:
        print(line)
    if not lines:
        _print_nothing_found(object or arguments.object)


def _print_nothing_found(object: str) -> None:
    print(f"kestrel-grpc: no {object} found", file=sys.stderr)


def _print_json(result: Result) -> None:
    print(json.dumps(dataclasses.asdict(result), ensure_ascii=False))


def _numbers(place: Point | Box) -> str:
    """One line for people and for `cut`: fractions of the width and height from the top left corner."""
    return " ".join(f"{number:.4f}" for number in dataclasses.astuple(place))


def _draw(
    arguments: argparse.Namespace,
    image: bytes | str,
    result: PointResult | DetectResult | SegmentResult | GazeResult,
) -> None:
    if arguments.draw is not None:
        draw(image, result).save(arguments.draw, "PNG")


def _explain(error: Exception) -> str:
    """One line that says what is wrong and, where known, what to do about it."""
    if isinstance(error, ServerError) and error.request_id:
        return f"{error} (see request {error.request_id} in the log of the server)"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
