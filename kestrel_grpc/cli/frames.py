"""Implements the client command frames: objects in the frames of a folder, or of images that come through a pipe.

The result of each frame is a line of JSON on stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from kestrel_grpc.cli.ask import add_request_flags, image_names, options_of
from kestrel_grpc.cli.common import add_client_arguments, run_with_client, show_json

# The client imports gRPC, which no help needs: what uses it imports it when it runs.
if TYPE_CHECKING:
    from kestrel_client import Client

STDIN = "-"
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_FILLING = b"\0\r\n"
_BLOCK_BYTES = 64 * 1024
_MAX_IMAGE_BYTES = 64 * 2**20


def add_frames_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "frames",
        help="find objects in the frames of a folder, a camera or a video",
        description="Find objects in one frame after the other, asking a running server. Prints a line of JSON for "
        "each frame that has been looked at.",
    )
    parser.add_argument(
        "image",
        metavar="IMAGE",
        nargs="+",
        help=f"image files or folders of them; or {STDIN} for JPEG or PNG files on stdin, one behind the other, as "
        "those of `ffmpeg -i video.mp4 -f image2pipe -c:v mjpeg -`",
    )
    parser.add_argument("object", metavar="OBJECT", help='what to look for, such as "dog"')
    parser.add_argument(
        "--live", action="store_true", help="look at the newest frame next and drop those before it, as of a camera"
    )
    parser.add_argument("--track", action="store_true", help="name objects through the frames, by their boxes")
    parser.add_argument("--points", action="store_true", help="find places, not boxes; without --track")
    parser.add_argument("--max-objects", metavar="N", type=int, help="maximum number of objects to find (150)")
    parser.add_argument("--min-score", metavar="SCORE", type=float, help="least score of objects in the result")
    add_client_arguments(parser)
    add_request_flags(parser)
    parser.set_defaults(run=partial(run_with_client, _frames))


def _frames(client: Client, arguments: argparse.Namespace) -> int:
    """Prints the results; returns 1 if a frame has an error, else 0."""
    if arguments.points and arguments.track:
        raise ValueError("--track needs boxes, so that it excludes --points")
    names: deque[tuple[int, str]] = deque()
    limits: dict[str, Any] = {
        "max_objects": arguments.max_objects,
        "min_score": arguments.min_score,
        "every_frame": not arguments.live,
    }
    images, options = _named(arguments.image, names), options_of(arguments)
    stream: Any
    if arguments.points:
        stream = client.point_frames(images, arguments.object, **limits, **options)
    else:
        stream = client.detect_frames(images, arguments.object, track=arguments.track, **limits, **options)
    has_failed = False
    with stream:
        for found in stream:
            while names and names[0][0] < found.index:  # those of frames that were dropped
                names.popleft()
            _, name = names.popleft()
            line: dict[str, Any] = {"frame": found.index, "name": name, "dropped": found.dropped_count}
            if found.error is None:
                result: Any = found.result
                fields = dataclasses.asdict(result)
                line |= {key: value for key, value in fields.items() if key != "groups"}
            else:
                line["error"] = {"reason": found.error.reason, "message": str(found.error)}
                has_failed = True
            show_json(line)
    return int(has_failed)


def _named(given: Sequence[str], names: deque[tuple[int, str]]) -> Iterator[Any]:
    """Yields the images, and adds the number and the name of each to `names`."""
    pipe = split_images(sys.stdin.buffer)
    sources = ((STDIN, image) for image in pipe) if list(given) == [STDIN] else _files(given)
    for number, (name, image) in enumerate(sources):
        names.append((number, name))
        yield image


def _files(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in image_names(given):
        yield name, name


def split_images(pipe: BinaryIO) -> Iterator[bytes]:
    """Yields the JPEG and PNG files that follow each other. Raises ValueError for other content.

    Zeros and line breaks between them are skipped: cameras fill the space behind a frame.
    """
    reader = _Reader(pipe)
    while reader.skip(_FILLING) and (beginning := reader.peek(len(_PNG))):
        if beginning[: len(_JPEG)] == _JPEG:
            reader.take(len(_JPEG))
            _pass_jpeg(reader)
        elif beginning == _PNG:
            reader.take(len(_PNG))
            _pass_png(reader)
        else:
            raise ValueError("stdin holds neither JPEG nor PNG files, or one of them is cut off")
        yield reader.finish()


def _pass_jpeg(reader: _Reader) -> None:
    while True:
        reader.pass_to(b"\xff")
        marker = reader.take(1)[0]
        while marker == 0xFF:  # fills the space before a marker
            marker = reader.take(1)[0]
        if marker == 0xD9:
            return
        # What is no segment: 0 behind a byte of the picture's data, restarts, and a marker without content.
        if marker and not 0xD0 <= marker <= 0xD8 and marker != 0x01:
            reader.take(int.from_bytes(reader.take(2), "big") - 2)


def _pass_png(reader: _Reader) -> None:
    kind = b""
    while kind != b"IEND":
        num_bytes = int.from_bytes(reader.take(4), "big")
        kind = reader.take(4)
        reader.take(num_bytes + 4)


class _Reader:
    """Reads a pipe; what has been taken since the last `finish` is one file."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._data = bytearray()
        self._position = 0

    def peek(self, count: int) -> bytes:
        """Returns the next bytes, fewer at the end."""
        while len(self._data) < self._position + count and self._read():
            pass
        return bytes(self._data[self._position : self._position + count])

    def skip(self, filling: bytes) -> bool:
        """Goes on behind all such bytes, which are in no file. Returns False at the end."""
        self._data = self._data.lstrip(filling)
        while not self._data:
            if not self._read():
                return False
            self._data = self._data.lstrip(filling)
        return True

    def take(self, count: int) -> bytes:
        """Returns the next bytes and goes on behind them. Raises ValueError if there are fewer."""
        if count < 0 or self._position + count > _MAX_IMAGE_BYTES:
            raise ValueError("an image on stdin is damaged, or too large")
        while len(self._data) < self._position + count:
            self._require()
        self._position += count
        return bytes(self._data[self._position - count : self._position])

    def pass_to(self, byte: bytes) -> None:
        """Goes on behind the next such byte."""
        while (place := self._data.find(byte, self._position)) < 0:
            self._position = len(self._data)
            self.take(0)
            self._require()
        self._position = place + 1

    def finish(self) -> bytes:
        """Returns the file that ends here."""
        file = bytes(self._data[: self._position])
        del self._data[: self._position]
        self._position = 0
        return file

    def _require(self) -> None:
        if not self._read():
            raise ValueError("stdin ends within an image")

    def _read(self) -> bool:
        block = self._pipe.read1(_BLOCK_BYTES) if hasattr(self._pipe, "read1") else self._pipe.read(_BLOCK_BYTES)
        self._data += block
        return bool(block)
