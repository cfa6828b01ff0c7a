"""From which size on does naming a stored image save time, compared with sending it again?

Starts a server with the built-in model on the CPU. Calls that send the image and calls that name it take turns,
over the loopback; a network adds the time in which it carries the bytes. All images are one small JPEG followed
by bytes that decoders ignore, so that the model's work is the same for every size. `Client(store_from_bytes=…)`
has its default from this.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

from bench.harness.report import write_json
from bench.harness.serving import machine_facts, started_server
from kestrel_client import Client

SIZES_KIB = (16, 64, 128, 256, 512, 1024, 4096)
_IMAGE_PX = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """Times of one size in seconds."""

    size_kib: int
    sent_s: list[float]
    """Of calls with the image in their message."""
    named_s: list[float]
    """Of calls that name the stored image."""
    digest_s: float
    """What the client needs for the image's name."""
    storing_s: float

    def as_text(self) -> str:
        """A row of the table, in ms."""
        saved_ms = (statistics.median(self.sent_s) - statistics.median(self.named_s)) * 1e3
        fastest_ms = (min(self.sent_s) - min(self.named_s)) * 1e3
        own = f"{self.digest_s * 1e3:.2f} | {self.storing_s * 1e3:.0f}"
        return f"| {self.size_kib} KiB | {fastest_ms:.1f} | {saved_ms:.1f} | {own} |"


def padded_image(num_bytes: int) -> bytes:
    """A small JPEG followed by zeros."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((_IMAGE_PX, _IMAGE_PX)).convert("RGB").save(file, "JPEG")
    return file.getvalue().ljust(num_bytes, b"\0")


def measure(client: Client, size_kib: int, num_calls: int) -> Row:
    """Calls of one size; the first of each kind is not counted."""
    data = padded_image(size_kib * 1024)
    storing_s, stored = _timed(lambda: client.upload_image(data))
    sent_s: list[float] = []
    named_s: list[float] = []
    for number in range(num_calls + 1):
        for image, times in ((data, sent_s), (stored, named_s)):
            seconds, _ = _timed(lambda image=image: client.point(image, "shape", max_objects=1))
            if number:
                times.append(seconds)
    digest_s = min(_timed(lambda: hashlib.sha256(data).digest())[0] for _ in range(5))
    return Row(size_kib, sent_s, named_s, digest_s, storing_s)


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def main() -> int:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=40, help="of each kind and size (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("bench/out/stored_images.json"), help="default: %(default)s"
    )
    arguments = parser.parse_args()
    print("| size | fastest sent − fastest named, ms | medians, ms | SHA-256 in the client, ms | storing, ms |")
    print("|---|---|---|---|---|")
    rows: list[Row] = []
    with started_server(("--device", "cpu")) as server, Client(server.address, store_from_bytes=None) as client:
        for size_kib in SIZES_KIB:
            rows.append(measure(client, size_kib, arguments.calls))
            print(rows[-1].as_text(), flush=True)
    write_json(
        arguments.json,
        {"machine": machine_facts(), "load": os.getloadavg(), "sizes": [asdict(row) for row in rows]},
    )
    print(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
