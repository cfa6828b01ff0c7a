"""Reports when objects appear on the screen and when they are gone: `python screens.py "error message"`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import mss

from kestrel_client import Client, RawImage


def screens(seconds: float) -> Iterator[RawImage]:
    """Yields what the first screen shows when it is asked, for so long."""
    ends = time.monotonic() + seconds
    with mss.mss() as screen:
        while time.monotonic() < ends:
            shot = screen.grab(screen.monitors[1])
            yield RawImage(shot.rgb, shot.width, shot.height)


def watch(object: str, seconds: float, address: str | None = None) -> Iterator[str]:
    """Yields a line for each object that appears, and for each that is gone."""
    seen: set[int | None] = set()
    with Client(address) as client, client.detect_frames(screens(seconds), object, track=True) as stream:
        for found in stream:
            if found.result is None:
                yield f"frame {found.index}: {found.error}"
                continue
            here = {one.track_id: one for one in found.result.objects}
            for name in sorted(here.keys() - seen, key=str):
                yield f"{object} {name} appears at {here[name].box}"
            yield from (f"{object} {name} is gone" for name in sorted(seen - here.keys(), key=str))
            seen = set(here)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("object")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--address")
    given = parser.parse_args()
    for line in watch(given.object, given.seconds, given.address):
        print(line, flush=True)
