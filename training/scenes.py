"""A scene: what is where, in which colour and size, on what background. Made from a seed, before any pixel.

Truth is unambiguous by construction: sizes fall in three bands with gaps between them, every colour stands out
from the background, and what overlaps does so little. Coordinates are fractions of the image.
"""

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from training.fonts import FACES, HELD_OUT_FACES, load_font
from training.palette import COLORS, Rgb, distance, held_out_color, nearest_name, sample_color
from training.shapes import FULL_BOX_PATH, SHAPES, Outline, outline
from training.words import random_text

HELD_OUT_SEED = 1_000_000_000
"""Seeds from here on are never trained on."""

MIN_SIDE_PX, MAX_SIDE_PX = 200, 1600
_SIZE_BANDS = {"small": (0.10, 0.15), "medium": (0.2, 0.28), "large": (0.38, 0.52)}  # of the shorter side
_ANY_SIZE = {"small": (0.075, 0.17), "medium": (0.15, 0.33), "large": (0.3, 0.55)}
_MIN_CONTRAST = 125.0
_MIN_OVERLAP_CONTRAST = 150.0
_NUM_TRIES = 30


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape or a printed text. `name` is "circle" and so on, or "letter", "digit", "number", "word"."""

    name: str
    color: str
    rgb: Rgb
    size: str
    """small, medium or large; empty for a text, and in scenes where sizes fall anywhere and have no names."""
    box: tuple[float, float, float, float]
    outline: Outline | None = None
    text: str = ""
    face: int = 0
    border: float = 0.0
    """Width of a dark or light rim as a share of the shape's size."""
    border_rgb: Rgb = (0, 0, 0)
    is_hollow: bool = False
    """Only the rim is drawn, in the shape's own colour."""

    @property
    def is_text(self) -> bool:
        return bool(self.text)

    @property
    def center(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def mark(self) -> tuple[float, float]:
        """A place on the ink of a shape, or the middle of a text."""
        x, y = (0.5, 0.5) if self.outline is None else self.outline.mark
        left, top, right, bottom = self.box
        return left + x * (right - left), top + y * (bottom - top)

    @property
    def path(self) -> tuple[str, ...]:
        return FULL_BOX_PATH if self.outline is None else self.outline.path


@dataclass(frozen=True, slots=True)
class Background:
    """`kind` is plain, gradient, stripes, checks, dots or noise. `name` is a colour where one can be named."""

    kind: str
    colors: tuple[Rgb, ...]
    name: str
    scale: float
    angle: float


@dataclass(frozen=True, slots=True)
class Wear:
    """What a camera and a file do to the picture; zero means nothing."""

    blur: float = 0.0
    """Radius as a share of the shorter side."""
    noise: float = 0.0
    """Standard deviation in 8-bit steps."""
    jpeg_quality: int = 0
    is_jagged: bool = False
    """Edges of shapes are drawn without smoothing."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything there is to know of a picture. `things` are in drawing order."""

    seed: int
    width_px: int
    height_px: int
    background: Background
    things: tuple[Thing, ...]
    wear: Wear = field(default_factory=Wear)

    @property
    def shapes(self) -> tuple[Thing, ...]:
        return tuple(thing for thing in self.things if not thing.is_text)

    @property
    def texts(self) -> tuple[Thing, ...]:
        return tuple(thing for thing in self.things if thing.is_text)


@dataclass(frozen=True, slots=True)
class World:
    """Says which fonts, values of colours and layouts scenes are made of."""

    color_value: Callable[[str, random.Random], Rgb]
    faces: tuple[int, ...]
    """Numbers of `load_font`."""
    layouts: tuple[str, ...]
    """Names of `_LAYOUTS`; without any, things are anywhere."""


TRAINED = World(sample_color, tuple(range(len(FACES))), ())
HELD_OUT = World(
    held_out_color,
    tuple(range(len(FACES), len(FACES) + len(HELD_OUT_FACES))),
    ("row", "column", "grid", "circle", "diagonal"),
)
"""Faces, values and layouts that no training scene has."""


def make_scene(seed: int, world: World = TRAINED) -> Scene:
    """Returns the scene of a seed."""
    rng = random.Random(seed)
    width_px, height_px = _random_size(rng)
    size_px = (width_px, height_px)
    background = _random_background(rng)
    colors = {name: rgb for name in COLORS if (rgb := _standing_out(name, background, rng, world)) is not None}
    plan = _random_plan(rng, list(colors) or list(COLORS))
    overlapping, has_sizes = rng.random() < 0.2, rng.random() < 0.75
    things: list[Thing] = []
    arrange = _LAYOUTS[rng.choice(world.layouts)] if world.layouts else None
    if rng.random() < 0.48:
        for _ in range(rng.choice((1, 1, 2))):
            color = rng.choice(list(colors) or list(COLORS))
            text = _random_text_thing(rng, color, width_px, height_px, background, world)
            _add(things, text, rng, overlapping=False, unit=min(size_px), size=size_px)
        if things and rng.random() < 0.2:
            plan = []
    places = arrange(len(plan)) if arrange is not None and plan else None
    for name, color, size in plan:
        thing = _random_shape(rng, name, color, size, has_sizes, width_px, height_px, background, world)
        _add(things, thing, rng, overlapping, unit=min(size_px), size=size_px, places=places)
    return Scene(seed, width_px, height_px, background, tuple(things), _random_wear(rng))


def _random_size(rng: random.Random) -> tuple[int, int]:
    ratio = rng.choice((1.0, 4 / 3, 3 / 2, 16 / 9)) if rng.random() < 0.5 else math.exp(rng.uniform(0, math.log(3)))
    short = math.exp(rng.uniform(math.log(MIN_SIDE_PX), math.log(1000)))
    long = min(MAX_SIDE_PX, round(short * ratio))
    sides = (long, max(MIN_SIDE_PX, round(long / ratio)))
    return sides if rng.random() < 0.6 else (sides[1], sides[0])


def _random_background(rng: random.Random) -> Background:
    base = _random_base(rng)
    kind = rng.choices(("plain", "gradient", "stripes", "checks", "dots", "noise"), (45, 15, 6, 5, 5, 24))[0]
    scale, angle = math.exp(rng.uniform(math.log(0.03), math.log(0.3))), rng.uniform(0, 180)
    if kind == "plain":
        name, far = nearest_name(base)
        return Background(kind, (base,), name if far < 30 else "", scale, angle)
    spread = rng.uniform(10, 38) if kind != "gradient" else rng.uniform(20, 110)
    other = tuple(
        min(255, max(0, round(value + rng.choice((-1, 1)) * rng.uniform(0.4, 1) * spread))) for value in base
    )
    return Background(kind, (base, (other[0], other[1], other[2])), "", scale, angle)


def _random_base(rng: random.Random) -> Rgb:
    draw = rng.random()
    if draw < 0.3:
        return 255, 255, 255
    if draw < 0.42:
        level = rng.randint(215, 250)
        return level, level - rng.randint(0, 8), level - rng.randint(0, 16)
    if draw < 0.55:
        level = rng.randint(0, 40)
        return level, level + rng.randint(0, 10), level + rng.randint(0, 20)
    if draw < 0.75:
        return sample_color(rng.choice(COLORS), rng)
    return rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255)


def _standing_out(name: str, background: Background, rng: random.Random, world: World) -> Rgb | None:
    for _ in range(3):
        rgb = world.color_value(name, rng)
        if all(distance(rgb, other) >= _MIN_CONTRAST for other in _backdrop(background)):
            return rgb
    return None


def _backdrop(background: Background) -> list[Rgb]:
    if len(background.colors) == 1:
        return list(background.colors)
    first, second = background.colors
    middle = tuple((a + b) // 2 for a, b in zip(first, second, strict=True))
    return [first, second, (middle[0], middle[1], middle[2])]


def _random_plan(rng: random.Random, colors: list[str]) -> list[tuple[str, str, str]]:
    """Names, colours and sizes of the shapes to place."""
    count = rng.choices(range(1, 11), (10, 14, 15, 15, 13, 11, 8, 6, 4, 4))[0]
    sizes = ("small", "medium", "large") if count <= 4 else ("small", "medium") if count <= 7 else ("small",)
    if count > 4 and rng.random() < 0.3:
        sizes = ("small",)
    style = rng.random()
    names, few_colors = SHAPES, colors
    if style < 0.45:  # few kinds, so that there is something to count and to tell apart
        names = rng.sample(SHAPES, rng.choice((1, 2, 2, 3)))
        few_colors = rng.sample(colors, min(len(colors), rng.choice((1, 2, 2, 3))))
    return [(rng.choice(names), rng.choice(few_colors), rng.choice(sizes)) for _ in range(count)]


def _random_shape(
    rng: random.Random,
    name: str,
    color: str,
    size: str,
    has_size: bool,
    width_px: int,
    height_px: int,
    background: Background,
    world: World,
) -> Thing:
    form = outline(name, rng)
    longest = rng.uniform(*(_SIZE_BANDS if has_size else _ANY_SIZE)[size]) * min(width_px, height_px)
    size = size if has_size else ""
    width, height = (longest, longest / form.aspect) if form.aspect >= 1 else (longest * form.aspect, longest)
    rgb = _standing_out(color, background, rng, world) or world.color_value(color, rng)
    border, is_hollow, border_rgb = 0.0, False, (0, 0, 0)
    draw = rng.random()
    if draw < 0.1:
        border = rng.uniform(0.02, 0.06)
        border_rgb = rng.choice(((0, 0, 0), (40, 40, 40), (255, 255, 255)))
    elif draw < 0.15 and name in ("square", "triangle", "star", "heart"):
        border, is_hollow = rng.uniform(0.08, 0.13), True
    box = (0.0, 0.0, width / width_px, height / height_px)
    return Thing(name, color, rgb, size, box, form, border=border, border_rgb=border_rgb, is_hollow=is_hollow)


def _random_text_thing(
    rng: random.Random, color: str, width_px: int, height_px: int, background: Background, world: World
) -> Thing:
    text, name = random_text(rng)
    face = world.faces[rng.randrange(len(world.faces)) if rng.random() < 0.9 else 0]
    aspect = text_aspect(text, face)
    unit = min(width_px, height_px)
    height = rng.uniform(0.07, 0.2 if len(text) > 1 else 0.3) * unit
    width = height * aspect
    if width > 0.85 * width_px:
        width, height = 0.85 * width_px, 0.85 * width_px / aspect
    rgb = _standing_out(color, background, rng, world) or world.color_value(color, rng)
    return Thing(name, color, rgb, "", (0.0, 0.0, width / width_px, height / height_px), text=text, face=face)


@functools.lru_cache(maxsize=4096)
def text_aspect(text: str, face: int) -> float:
    """Width over height of a text's ink."""
    left, top, right, bottom = load_font(face, 96).getbbox(text)
    return (right - left) / (bottom - top)


def _add(
    things: list[Thing],
    thing: Thing,
    rng: random.Random,
    overlapping: bool,
    unit: int,
    size: tuple[int, int],
    places: list[tuple[float, float]] | None = None,
) -> None:
    """Places `thing` where it is clear of the others, or leaves it out where no such place is found.

    With `places` its centre is at one of them, which is then removed.
    """
    width, height = thing.box[2], thing.box[3]
    margin_x, margin_y = 0.02 * unit / size[0], 0.02 * unit / size[1]
    if width > 1 - 2 * margin_x or height > 1 - 2 * margin_y:
        return
    if places is not None:
        overlapping = False
    for left, top in _corners(rng, places, (width, height), (margin_x, margin_y)):
        placed = _moved(thing, (left, top, left + width, top + height))
        if all(_is_clear(placed, other, overlapping, margin_x, margin_y) for other in things):
            things.append(placed)
            if places is not None:
                places.remove(min(places, key=lambda place: math.dist(place, placed.center)))
            return


def _corners(
    rng: random.Random,
    places: list[tuple[float, float]] | None,
    size: tuple[float, float],
    margin: tuple[float, float],
) -> Iterator[tuple[float, float]]:
    """Yields corners to try: random ones, or those for centres at `places`."""
    (width, height), (margin_x, margin_y) = size, margin
    for _ in range(_NUM_TRIES if places is None else 0):
        yield rng.uniform(margin_x, 1 - margin_x - width), rng.uniform(margin_y, 1 - margin_y - height)
    for x, y in places or ():
        left, top = x - width / 2, y - height / 2
        if margin_x <= left <= 1 - margin_x - width and margin_y <= top <= 1 - margin_y - height:
            yield left, top


def _row(count: int) -> list[tuple[float, float]]:
    return [((index + 0.5) / count, 0.5) for index in range(count)]


def _column(count: int) -> list[tuple[float, float]]:
    return [(0.5, y) for y, _ in _row(count)]


def _grid(count: int) -> list[tuple[float, float]]:
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    return [((index % columns + 0.5) / columns, (index // columns + 0.5) / rows) for index in range(columns * rows)]


def _circle(count: int) -> list[tuple[float, float]]:
    turns = [2 * math.pi * index / count for index in range(count)]
    return [(0.5 + 0.33 * math.cos(turn), 0.5 + 0.33 * math.sin(turn)) for turn in turns]


def _diagonal(count: int) -> list[tuple[float, float]]:
    return [(x, x) for x, _ in _row(count)]


_LAYOUTS: dict[str, Callable[[int], list[tuple[float, float]]]] = {
    "row": _row,
    "column": _column,
    "grid": _grid,
    "circle": _circle,
    "diagonal": _diagonal,
}
"""Centres of so many things, as fractions of the image."""


def _moved(thing: Thing, box: tuple[float, float, float, float]) -> Thing:
    return Thing(
        thing.name, thing.color, thing.rgb, thing.size, box, thing.outline, thing.text, thing.face,
        thing.border, thing.border_rgb, thing.is_hollow,
    )  # fmt: skip


def _is_clear(new: Thing, old: Thing, overlapping: bool, margin_x: float, margin_y: float) -> bool:
    width = min(new.box[2], old.box[2]) - max(new.box[0], old.box[0])
    height = min(new.box[3], old.box[3]) - max(new.box[1], old.box[1])
    if width < -margin_x or height < -margin_y:
        return True
    if not overlapping or new.is_text or old.is_text or width <= 0 or height <= 0:
        return False
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (new.box, old.box)]
    x, y = old.mark
    covers_mark = (
        new.box[0] - margin_x <= x <= new.box[2] + margin_x and new.box[1] - margin_y <= y <= new.box[3] + margin_y
    )
    return (
        width * height <= 0.2 * min(areas)
        and not covers_mark
        and distance(new.rgb, old.rgb) >= _MIN_OVERLAP_CONTRAST
    )


def _random_wear(rng: random.Random) -> Wear:
    is_jagged = rng.random() < 0.25
    if rng.random() < 0.4:
        return Wear(is_jagged=is_jagged)
    return Wear(
        is_jagged=is_jagged,
        blur=rng.uniform(0, 0.004) if rng.random() < 0.4 else 0.0,
        noise=rng.uniform(0, 14) if rng.random() < 0.4 else 0.0,
        jpeg_quality=rng.randint(25, 95) if rng.random() < 0.6 else 0,
    )
