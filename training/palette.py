"""The eleven colours of the world: the many values that each name covers, and how far two values lie apart."""

import random

Rgb = tuple[int, int, int]

# Values that people agree to call by the name; a colour is drawn from between two of them. The named colours of
# the web are among them. Names whose neighbours blur into each other keep a gap.
ANCHORS: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 20, 60), (200, 25, 30), (230, 50, 40), (214, 39, 40)),
    "orange": ((255, 165, 0), (255, 140, 0), (245, 130, 32), (255, 120, 15)),
    "yellow": ((255, 255, 0), (255, 220, 0), (250, 225, 60), (245, 235, 90)),
    "green": ((0, 128, 0), (0, 255, 0), (34, 139, 34), (60, 180, 75), (46, 204, 113), (0, 150, 70)),
    "blue": ((0, 0, 255), (30, 110, 255), (65, 105, 225), (0, 90, 200), (25, 60, 170), (52, 120, 230)),
    "purple": ((128, 0, 128), (148, 0, 211), (138, 43, 226), (120, 50, 170), (150, 80, 200)),
    "pink": ((255, 192, 203), (255, 105, 180), (245, 140, 190), (250, 160, 200), (255, 130, 170)),
    "brown": ((165, 42, 42), (139, 69, 19), (120, 72, 40), (101, 67, 33), (150, 90, 50)),
    "black": ((0, 0, 0), (20, 20, 22), (32, 30, 30)),
    "white": ((255, 255, 255), (245, 245, 245), (250, 248, 240)),
    "gray": ((128, 128, 128), (105, 105, 105), (160, 160, 160), (118, 122, 128)),
}
COLORS = tuple(ANCHORS)
_JITTER = 6

# Values that people call by the same names and that `sample_color` never gives, for scores.
HELD_OUT_VALUES: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 60, 70), (196, 0, 0)),
    "orange": ((225, 150, 20), (255, 120, 60)),
    "yellow": ((225, 205, 30), (255, 235, 140)),
    "green": ((0, 100, 0), (60, 179, 113), (120, 200, 60)),
    "blue": ((30, 144, 255), (0, 0, 205)),
    "purple": ((186, 85, 211), (102, 51, 153)),
    "pink": ((221, 160, 221), (240, 128, 160)),
    "brown": ((125, 85, 70), (90, 45, 20)),
    "black": ((30, 30, 55), (45, 40, 40)),
    "white": ((240, 255, 255), (230, 230, 250)),
    "gray": ((169, 169, 169), (112, 128, 144), (85, 85, 85)),
}


def sample_color(name: str, rng: random.Random) -> Rgb:
    """A value that the name covers."""
    first, second = rng.choice(ANCHORS[name]), rng.choice(ANCHORS[name])
    share = rng.random()
    red, green, blue = (
        min(255, max(0, round(a + (b - a) * share + rng.uniform(-_JITTER, _JITTER))))
        for a, b in zip(first, second, strict=True)
    )
    return red, green, blue


def held_out_color(name: str, rng: random.Random) -> Rgb:
    """Returns a value that the name covers and that no training scene has."""
    return rng.choice(HELD_OUT_VALUES[name])


def distance(first: Rgb, second: Rgb) -> float:
    """How different two values look, from 0 to about 765 (the "redmean" weighting of RGB differences)."""
    mean_red = (first[0] + second[0]) / 2
    red, green, blue = (a - b for a, b in zip(first, second, strict=True))
    weighted = (2 + mean_red / 256) * red**2 + 4 * green**2 + (2 + (255 - mean_red) / 256) * blue**2
    return weighted**0.5


def nearest_name(value: Rgb) -> tuple[str, float]:
    """The name whose anchors lie nearest, and that distance."""
    return min(
        ((name, min(distance(value, anchor) for anchor in anchors)) for name, anchors in ANCHORS.items()),
        key=lambda pair: pair[1],
    )
