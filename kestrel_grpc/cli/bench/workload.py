"""Makes the requests of `kestrel-grpc bench`: about drawn charts, about pictures of your own, or without any.

A chart is drawn from a seed: 800 by 557 pixels, about 40 KB as JPEG, which a Moondream cuts into 2 × 4 crops and a
global crop.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from kestrel_grpc.cli.bench.calls import Question
from kestrel_grpc.cli.common import PICTURE_SUFFIXES

WIDTH_PX, HEIGHT_PX = 800, 557
JPEG_QUALITY = 90
_TABLE_MARKER, _TABLE_HEADER_BYTES = b"\xff\xdb", 5
"""The beginning of a quantisation table in a JPEG file: marker, length and number of the table."""
_NUM_CHANGED_ENTRIES, _LARGEST_ENTRY = 9, 6
"""The lowest frequencies, without the mean of a block; 6^9 is 10 million pictures of each drawing."""

NUM_DRAWN = 16
"""The drawings of a process. Drawing takes longer than asking, so they are reused, each time with other pixels."""

QUESTIONS = (
    "What is in this picture?",
    "What is in this image?",
    "What do you see?",
    "What does the picture show?",
    "What does the image show?",
    "Describe the picture.",
    "Describe the image.",
    "Describe this picture.",
    "What objects are in the picture?",
    "What objects are in the image?",
    "List everything in the picture.",
    "What is shown here?",
)
"""The default questions about pictures, which models answer with a list or a sentence: with tokens to measure."""
TEXT_QUESTIONS = (
    "Who are you?",
    "What can you do?",
    "Write a poem about the sea.",
    "Explain how rain forms.",
    "Describe a city by the river.",
)
"""The default questions without a picture."""

OBJECTS = ("bar",)
_DEFAULTS = (QUESTIONS, TEXT_QUESTIONS, OBJECTS)
_MOST_SIZES = 8
"""The most sizes of pictures that a report lists."""

_PALETTE = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#9c755f", "#555555")
_SYLLABLES = ("ka", "to", "mi", "ren", "sol", "va", "dor", "el", "nu", "pra", "shi", "gan")


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes the questions. Requests are numbered, and the number selects the text and the picture."""

    skill: str
    texts: tuple[str, ...]
    """The questions, or the names of objects; empty for captions."""
    pictures: Path | None = None
    """A file, or a folder of files; None for drawn charts."""
    num_pictures: int | None = None
    """The number of different charts: 0 for requests without a picture, None for a new file in every request."""
    max_tokens: int | None = None
    temperature: float | None = None
    is_streamed: bool = True
    adapters: tuple[str, ...] = ()
    sends_digests: bool = False
    """True if the metadata of a call name its picture."""

    def __call__(self) -> Callable[[None, int], Question]:
        """Reads or draws the pictures; returns the function that makes the request with a number. Raises
        OSError."""
        picture = self._pictures()

        def question(_: None, number: int) -> Question:
            return Question(
                skill=self.skill,
                text=self.texts[number % len(self.texts)] if self.texts else "",
                picture=picture(number),
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                is_streamed=self.is_streamed,
                adapter=self.adapters[number % len(self.adapters)] if self.adapters else "",
                sends_digest=self.sends_digests,
            )

        return question

    def facts(self) -> dict[str, Any]:
        """Returns what a report says about the requests: which pictures, of which size, and which texts.

        Raises OSError for unreadable pictures.
        """
        sent = [name for name in (self._pictures()(number) for number in range(self.num_kinds)) if name is not None]
        sizes = Counter("{} × {} px".format(*Image.open(io.BytesIO(data)).size) for data in sent)
        return {
            "skill": self.skill,
            "pictures": self._said_pictures(),
            "picture_sizes": dict(sizes.most_common(_MOST_SIZES)),
            "mean_picture_bytes": round(sum(map(len, sent)) / len(sent)) if sent else 0,
            "texts": f"{len(self.texts)} {'default' if self.texts in _DEFAULTS else 'given'}"
            if self.texts
            else "none",
            "texts_sha256": hashlib.sha256("\n".join(self.texts).encode()).hexdigest()[:16],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }

    @property
    def num_kinds(self) -> int:
        """The number of drawings or given files."""
        if self.pictures is not None:
            return len(picture_files(self.pictures))
        return NUM_DRAWN if self.num_pictures is None else min(self.num_pictures, NUM_DRAWN)

    def _said_pictures(self) -> str:
        if self.pictures is not None:
            return f"{self.num_kinds} given file{'' if self.num_kinds == 1 else 's'}, in turn"
        if self.num_pictures is None:
            return "drawn charts, another picture in each request"
        if self.num_pictures == 0:
            return "none"
        return f"{self.num_pictures} drawn chart{'' if self.num_pictures == 1 else 's'}, in turn"

    def _pictures(self) -> Callable[[int], bytes | None]:
        if self.pictures is not None:
            files = [path.read_bytes() for path in picture_files(self.pictures)]
            return lambda number: files[number % len(files)]
        count = self.num_pictures
        if count == 0:
            return lambda number: None
        drawn = [chart(seed) for seed in range(min(count or NUM_DRAWN, NUM_DRAWN))]
        if count is None:
            return lambda number: another_picture(drawn[number % len(drawn)], f"{number:016d}")
        return lambda number: another_picture(drawn[number % count % len(drawn)], f"{number % count:016d}")


def picture_files(path: Path) -> list[Path]:
    """Returns the file, or the image files in the folder, by name. Raises ValueError if there are none."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.iterdir() if item.suffix.lower() in PICTURE_SUFFIXES and item.is_file())
    if not files:
        raise ValueError(f"{path}: has no image files")
    return files


def chart(seed: int, width_px: int = WIDTH_PX, height_px: int = HEIGHT_PX) -> bytes:
    """Draws a bar chart as JPEG: bars, the numbers on them, names, a grid and two lines of text."""
    chance = random.Random(seed)
    image = Image.new("RGB", (width_px, height_px), "white")
    draw = ImageDraw.Draw(image)
    large, small = ImageFont.load_default(max(height_px / 22, 8)), ImageFont.load_default(max(height_px / 38, 7))
    left, right, top, bottom = 0.08 * width_px, 0.98 * width_px, 0.17 * height_px, 0.82 * height_px
    draw.text((left, 0.02 * height_px), _words(chance, 3).title(), fill="black", font=large)
    draw.text((left, 0.09 * height_px), _words(chance, 5), fill="#444444", font=small)
    highest = chance.randint(40, 900)
    for step in range(6):
        y = bottom - (bottom - top) * step / 5
        draw.line((left, y, right, y), fill="#c8c8c8")
        draw.text((0.01 * width_px, y - 0.015 * height_px), str(highest * step // 5), fill="black", font=small)
    num_bars = chance.randint(5, 8)
    pitch = (right - left) / num_bars
    for bar in range(num_bars):
        value = chance.uniform(0.1, 1.0)
        x, y = left + pitch * (bar + 0.15), bottom - (bottom - top) * value
        draw.rectangle((x, y, x + 0.7 * pitch, bottom), fill=chance.choice(_PALETTE), outline="black")
        draw.text((x, y - 0.035 * height_px), f"{highest * value:.1f}", fill="black", font=small)
        draw.text((x, bottom + 0.01 * height_px), _words(chance, 1)[:8], fill="black", font=small)
    source = f"{_words(chance, 3)} {chance.randint(1900, 2030)}"
    draw.text((left, 0.93 * height_px), source, fill="#444444", font=small)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def another_picture(jpeg: bytes, name: str) -> bytes:
    """Returns another picture for each name, made of a JPEG of `chart`: no cache has its file or any of its crops.

    Other entries of the table by which frequencies are multiplied change the pixels of every edge, and a copy of
    the file with them is made much faster than a picture is drawn.
    """
    chance, changed = random.Random(name), bytearray(jpeg)
    table = jpeg.index(_TABLE_MARKER) + _TABLE_HEADER_BYTES
    for entry in range(1, 1 + _NUM_CHANGED_ENTRIES):
        changed[table + entry] = chance.randint(1, _LARGEST_ENTRY)
    text = name.encode()
    comment = b"\xff\xfe" + (2 + len(text)).to_bytes(2, "big") + text
    return bytes(changed[:2]) + comment + bytes(changed[2:])


def _words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices(_SYLLABLES, k=chance.randint(2, 4))) for _ in range(count))
