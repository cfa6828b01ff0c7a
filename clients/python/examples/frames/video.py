"""Draws boxes with ids around objects into a video: `python video.py in.mp4 out.mp4 person`."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
from PIL import ImageDraw

from kestrel_client import Client, RawImage


def draw(source: str, target: str, object: str, address: str | None = None) -> int:
    """Writes the video `target`; returns the number of its frames."""
    num_frames = 0
    with av.open(source) as video, av.open(target, "w") as drawn, Client(address) as client:
        pictures: deque[Any] = deque()

        def frames() -> Iterator[Any]:
            for frame in video.decode(video=0):
                picture = frame.to_image()
                pictures.append(picture)
                yield RawImage(picture.tobytes(), *picture.size)

        pictures_in = video.streams.video[0]
        output: Any = drawn.add_stream("mpeg4", rate=Fraction(pictures_in.average_rate or 25))
        output.width, output.height = pictures_in.width, pictures_in.height
        # Every frame has an answer, in order, so each answer is about the oldest picture that is left.
        with client.detect_frames(frames(), object, every_frame=True, track=True) as stream:
            for found in stream:
                picture = pictures.popleft()
                if found.result is not None:
                    pen = ImageDraw.Draw(picture)
                    for one in found.result.objects:
                        corners = one.box.to_pixels(*picture.size)
                        pen.rectangle(corners, outline="red", width=3)
                        pen.text(corners[:2], f"{object} {one.track_id}", fill="red")
                drawn.mux(output.encode(av.VideoFrame.from_image(picture)))
                num_frames += 1
        drawn.mux(output.encode(None))
    return num_frames


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("object")
    parser.add_argument("--address")
    given = parser.parse_args()
    print(f"{draw(given.source, given.target, given.object, given.address)} frames")
