"""Finds fonts for labels in any script: Pillow's own, and installed ones that fontconfig knows. Needs Pillow."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

_TIMEOUT_S = 5.0
_MAX_CODE_POINTS = 6
_BASELINE = "ls"
_NO_CHARACTER = "\U0010fffe"  # in no font, so that it is drawn as a character that is missing


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a label that is drawn in one font."""

    text: str
    font: FreeTypeFont


@dataclass(frozen=True, slots=True)
class Line:
    """A text that is laid out: its runs, where each begins, and the box around all."""

    runs: list[Run]
    starts: list[float]
    left: float
    top: float
    width: float
    height: float

    def draw(self, pencil: ImageDraw, corner: tuple[float, float], ink: tuple[int, int, int]) -> None:
        """Draws the text with the upper left corner of its box at a place."""
        for run, start in zip(self.runs, self.starts, strict=True):
            place = (corner[0] - self.left + start, corner[1] - self.top)
            pencil.text(place, run.text, ink, run.font, anchor=_BASELINE)


@dataclass(frozen=True, slots=True)
class _Installed:
    path: str
    index: int
    ranges: tuple[tuple[int, int], ...]

    def covers(self, text: str) -> bool:
        return all(
            _is_invisible(char) or any(low <= ord(char) <= high for low, high in self.ranges) for char in text
        )


class LabelFonts:
    """The fonts of one size. Each text is looked up once."""

    def __init__(self, size_px: float) -> None:
        from PIL import ImageFont

        self._size_px = size_px
        self._own = cast("FreeTypeFont", ImageFont.load_default(size_px))
        self._missing = _drawn(self._own, _NO_CHARACTER)
        self._runs: dict[str, list[Run]] = {}
        self._loaded: dict[tuple[str, int], FreeTypeFont | None] = {}

    def line(self, text: str) -> Line:
        """Lays out a text that has no line breaks."""
        runs = self.runs(text)
        boxes = [run.font.getbbox(run.text, anchor=_BASELINE) for run in runs]
        *starts, end = itertools.accumulate((run.font.getlength(run.text) for run in runs), initial=0.0)
        left, top = boxes[0][0], min(box[1] for box in boxes)
        right, bottom = max(starts[-1] + boxes[-1][2], end), max(box[3] for box in boxes)
        return Line(runs, starts, left, top, right - left, bottom - top)

    def runs(self, text: str) -> list[Run]:
        """Returns the parts of a text from left to right, each with a font that has its characters.

        Pillow's own font has Latin letters. For others `fc-match` finds an installed font: one for the whole text
        if there is any. Characters that no font has are written without their accents, or as code points, such as
        "U+661F".
        """
        if text not in self._runs:
            self._runs[text] = self._find(unicodedata.normalize("NFC", text))
        return self._runs[text]

    def _find(self, text: str) -> list[Run]:
        if self._has(text):
            return [Run(text, self._own)]
        installed = _installed_fonts(text)
        for found in installed:
            if found.covers(text) and (font := self._load(found)) is not None:
                return [Run(text, font)]
        runs, num_missing = [], 0
        text = "".join(self._plain(char, installed) for char in text)
        chosen = [self._choose(char, installed) for char in text]
        for font, group in itertools.groupby(zip(text, chosen, strict=True), key=lambda pair: pair[1]):
            part = "".join(char for char, _ in group)
            if font is self._own:
                part = "".join(char for char in part if char.isspace() or not _is_invisible(char))
            elif font is None:
                points = [f"U+{ord(char):04X}" for char in part]
                left = _MAX_CODE_POINTS - num_missing
                num_missing += len(points)
                part = " ".join(
                    points if len(points) <= left else [*points[: max(left, 0)], "…"] if left >= 0 else []
                )
            runs.append(Run(part, font or self._own))
        return runs

    def _choose(self, char: str, installed: list[_Installed]) -> FreeTypeFont | None:
        if self._has(char):
            return self._own
        return next((font for found in installed if found.covers(char) and (font := self._load(found))), None)

    def _plain(self, char: str, installed: list[_Installed]) -> str:
        """Returns the letter without its accents where only that can be drawn."""
        letter = unicodedata.normalize("NFKD", char)[0]
        return letter if self._choose(char, installed) is None and self._has(letter) else char

    def _has(self, text: str) -> bool:
        return all(_is_invisible(char) or _drawn(self._own, char) != self._missing for char in text)

    def _load(self, found: _Installed) -> FreeTypeFont | None:
        from PIL import ImageFont

        place = found.path, found.index
        if place not in self._loaded:
            try:
                self._loaded[place] = ImageFont.truetype(found.path, self._size_px, found.index)
            except OSError:  # such as a font of bitmaps, which has other sizes
                self._loaded[place] = None
        return self._loaded[place]


def _installed_fonts(text: str) -> list[_Installed]:
    """Returns the installed fonts that draw in one colour, the best for a text first; empty without fontconfig."""
    program = shutil.which("fc-match")
    if program is None:
        return []
    points = " ".join(f"{ord(char):x}" for char in sorted(set(text)) if not _is_invisible(char))
    pattern = f"sans-serif:charset={points}:scalable=true:color=false"
    command = [program, "--sort", "--format", "%{file}\\t%{index}\\t%{color}\\t%{charset}\\n", pattern]
    try:
        listed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return list(_parsed(listed.decode("utf-8", "surrogateescape")))


def _parsed(listed: str) -> Iterator[_Installed]:
    for line in listed.splitlines():
        path, *rest = line.split("\t")
        if len(rest) != 3 or rest[1] == "True":
            continue
        try:
            ends = [part.split("-") for part in rest[2].split()]
            ranges = tuple((int(pair[0], 16), int(pair[-1], 16)) for pair in ends)
            yield _Installed(path, int(rest[0]), ranges)
        except ValueError:
            continue


def _is_invisible(char: str) -> bool:
    """Returns whether a character has no glyph of its own: spaces, joiners and selectors of variants."""
    return unicodedata.category(char) in ("Zs", "Cc", "Cf") or "\ufe00" <= char <= "\ufe0f"


def _drawn(font: FreeTypeFont, char: str) -> tuple[tuple[int, int], bytes]:
    mask: Any = font.getmask(char)
    return mask.size, bytes(mask)
