"""Pictures that change in a part from one to the next, as screens and cameras show them, each made from a seed.

A stream of pictures begins with a chart. `Change` says how a picture follows from the one before. The places of a
repaint are such that it lies inside one crop of a Moondream, also after a resize and with the blocks of a JPEG.
"""

import io
import random
from enum import Enum

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from kestrel_grpc.cli.bench.workload import JPEG_QUALITY, chart

_REPAINTED_PX = 40
_CROP_PX, _MARGINS_PX = 378, 112
"""The side of a crop and its overlap with the next one, in pixels of the resized picture."""
_ROWS, _COLUMNS = 2, 4
"""The crops of a chart."""
_GUARD_PX = 22
"""The pixels around a change that a resize and the blocks of a JPEG change too."""
_POINTER = ((0, 0), (0, 17), (4, 13), (7, 19), (10, 18), (7, 12), (12, 12))
_TYPED = "The quick brown fox jumps over the lazy dog, and then it does so again. "
_SCROLLED_PX = 37
_NOISE = 2


class Change(Enum):
    """Says how a picture follows from the one before."""

    REPAINT = "40 × 40 pixels inside one crop are repainted"
    POINTER = "a pointer has moved"
    TYPED = "a line across the crops has a further character"
    SCROLL = "it is scrolled"
    NOISE = "every pixel has other noise"


class ChangingPictures:
    """The pictures of many streams. Remembers the last one of each stream."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._bases: dict[int, Image.Image] = {}
        self._last: dict[int, tuple[int, Image.Image]] = {}  # version and picture, where each follows from the last
        self._font = ImageFont.load_default(20)

    def picture(self, stream: int, version: int) -> Image.Image:
        """Returns a picture of a stream, the same for the same numbers. Versions count from 0."""
        base = self._bases.get(stream)
        if base is None:
            # No other workload draws these charts.
            base = self._bases[stream] = Image.open(io.BytesIO(chart(100_000 + stream))).convert("RGB")
        if self._change is Change.REPAINT:
            return self._repainted(base, stream, version)
        if self._change is Change.SCROLL:
            return ImageChops.offset(base, 0, -_SCROLLED_PX * version % base.height)
        picture = base.copy()
        if self._change is Change.POINTER:
            chance = random.Random(f"{stream} {version}")
            x, y = chance.randrange(base.width - 13), chance.randrange(base.height - 20)
            points = [(x + dx, y + dy) for dx, dy in _POINTER]
            ImageDraw.Draw(picture).polygon(points, fill="white", outline="black")
        elif self._change is Change.TYPED:
            top = base.height // 2
            draw = ImageDraw.Draw(picture)
            draw.rectangle((0, top, base.width, top + 30), fill="white")
            draw.text((10, top + 3), _TYPED[: 1 + version % len(_TYPED)], fill="black", font=self._font)
        else:
            noise = np.random.default_rng((stream, version)).integers(
                -_NOISE, _NOISE + 1, (base.height, base.width, 3)
            )
            picture = Image.fromarray((np.asarray(base) + noise).clip(0, 255).astype(np.uint8))
        return picture

    def encoded(self, stream: int, version: int, file_format: str) -> bytes:
        """Returns a picture as a file, JPEG or PNG."""
        file = io.BytesIO()
        picture = self.picture(stream, version)
        if file_format == "PNG":
            picture.save(file, "PNG", compress_level=1)
        else:
            picture.save(file, "JPEG", quality=JPEG_QUALITY)
        return file.getvalue()

    def _repainted(self, base: Image.Image, stream: int, version: int) -> Image.Image:
        known, picture = self._last.get(stream, (0, base))
        if known > version:
            known, picture = 0, base
        picture = picture.copy()
        draw = ImageDraw.Draw(picture)
        for number in range(known + 1, version + 1):
            chance = random.Random(f"{stream} {number}")
            x = _inside(chance, base.width, _COLUMNS)
            y = _inside(chance, base.height, _ROWS)
            colour = tuple(chance.randrange(256) for _ in range(3))
            draw.rectangle((x, y, x + _REPAINTED_PX - 1, y + _REPAINTED_PX - 1), fill=colour)
        self._last[stream] = version, picture
        return picture


def _inside(chance: random.Random, length_px: int, num_crops: int) -> int:
    """Returns a place along one axis at which a repaint is inside one of the crops alone."""
    stride_px = _CROP_PX - _MARGINS_PX
    scale = length_px / (num_crops * stride_px + _MARGINS_PX)
    crop = chance.randrange(num_crops)
    first_px = 0.0 if crop == 0 else (crop * stride_px + _MARGINS_PX) * scale + _GUARD_PX
    last_px = length_px if crop == num_crops - 1 else (crop + 1) * stride_px * scale - _GUARD_PX
    return chance.randint(int(first_px) + 1, int(last_px) - _REPAINTED_PX - 1)
