"""Scenes to pixels. Draws at any size, so that training can draw what the model sees and no more."""

import io
import math

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from training.fonts import load_font
from training.scenes import Background, Scene, Thing

_SUPERSAMPLING = 3


def draw_scene(scene: Scene, *, max_area_px: float = math.inf) -> Image.Image:
    """The scene's picture, smaller than its nominal size where that has more than `max_area_px`."""
    shrink = min(1.0, math.sqrt(max_area_px / (scene.width_px * scene.height_px)))
    size = (max(1, round(scene.width_px * shrink)), max(1, round(scene.height_px * shrink)))
    noise = np.random.default_rng(scene.seed)
    image = _draw_background(scene.background, size, noise)
    for thing in scene.things:
        if thing.is_text:
            _draw_text(image, thing)
        else:
            _draw_shape(image, thing, is_jagged=scene.wear.is_jagged)
    return _worn(image, scene, noise)


def encode_scene(scene: Scene) -> bytes:
    """The picture as a PNG file; what JPEG does to it is in the pixels already."""
    image = draw_scene(scene)
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1)
    return data.getvalue()


def _draw_background(background: Background, size: tuple[int, int], noise: np.random.Generator) -> Image.Image:
    if background.kind == "plain":
        return Image.new("RGB", size, background.colors[0])
    share = _BACKDROPS[background.kind](background, size, noise)
    first, second = (Image.new("RGB", size, color) for color in background.colors)
    return Image.composite(second, first, share)


def _gradient(background: Background, size: tuple[int, int], noise: np.random.Generator) -> Image.Image:
    ramp = _ramp(background.angle, (64, 64))
    low, high = ramp.min(), ramp.max()
    return Image.fromarray(((ramp - low) / (high - low) * 255).astype(np.uint8)).resize(size)


def _stripes(background: Background, size: tuple[int, int], noise: np.random.Generator) -> Image.Image:
    period = max(4.0, background.scale * min(size))
    wave = np.sin(_ramp(background.angle, size) * (2 * math.pi / period))
    return Image.fromarray(np.clip(wave * 400 + 128, 0, 255).astype(np.uint8))


def _checks(background: Background, size: tuple[int, int], noise: np.random.Generator) -> Image.Image:
    side = max(3, round(background.scale * min(size) / 2))
    rows, columns = np.arange(size[1])[:, None] // side, np.arange(size[0])[None, :] // side
    return Image.fromarray(((rows + columns) % 2 * 255).astype(np.uint8))


def _dots(background: Background, size: tuple[int, int], noise: np.random.Generator) -> Image.Image:
    period = max(5.0, background.scale * min(size) / 2)
    rows, columns = np.arange(size[1])[:, None], np.arange(size[0])[None, :]
    wave = np.cos(2 * math.pi * rows / period) + np.cos(2 * math.pi * columns / period)
    return Image.fromarray(np.clip((wave - 1) * 300 + 128, 0, 255).astype(np.uint8))


def _clouds(background: Background, size: tuple[int, int], noise: np.random.Generator) -> Image.Image:
    """Noise of several sizes laid over each other, as of a photograph's out-of-focus ground."""
    total = Image.new("L", size, 128)
    for cells in (3, 7, 17, 41):
        layer = Image.fromarray(noise.integers(0, 256, (cells, cells), dtype=np.uint8))
        total = Image.blend(total, layer.resize(size, Image.Resampling.BICUBIC), 0.45)
    return total


_BACKDROPS = {"gradient": _gradient, "stripes": _stripes, "checks": _checks, "dots": _dots, "noise": _clouds}


def _ramp(angle: float, size: tuple[int, int]) -> np.ndarray:
    radians = math.radians(angle)
    rows = np.arange(size[1], dtype=np.float32)[:, None]
    columns = np.arange(size[0], dtype=np.float32)[None, :]
    return columns * math.cos(radians) + rows * math.sin(radians)


def _draw_shape(image: Image.Image, thing: Thing, *, is_jagged: bool) -> None:
    assert thing.outline is not None, "a shape has an outline"
    left, top, right, bottom = _pixels(thing, image.size)
    x0, y0 = math.floor(left), math.floor(top)
    size = (math.ceil(right) - x0 + 1, math.ceil(bottom) - y0 + 1)
    large = (size[0] * _SUPERSAMPLING, size[1] * _SUPERSAMPLING)
    mask = Image.new("L", large)
    pen = ImageDraw.Draw(mask)
    contours = [
        [
            ((left - x0 + x * (right - left)) * _SUPERSAMPLING, (top - y0 + y * (bottom - top)) * _SUPERSAMPLING)
            for x, y in contour
        ]
        for contour in thing.outline.contours
    ]
    for index, contour in enumerate(contours):
        pen.polygon(contour, fill=0 if index else 255)
    fill = mask
    if thing.border:
        rim = Image.new("L", large)
        # Half of the line falls outside the shape and is cut off.
        width = max(2, round(2 * thing.border * max(large)))
        for contour in contours:
            ImageDraw.Draw(rim).line([*contour, contour[0], contour[1]], fill=255, width=width, joint="curve")
        rim = ImageChops.darker(rim, mask)
        if thing.is_hollow:
            fill = rim
        else:
            image.paste(thing.rgb, (x0, y0), _stencil(mask, is_jagged))
            image.paste(thing.border_rgb, (x0, y0), _stencil(rim, is_jagged))
            return
    image.paste(thing.rgb, (x0, y0), _stencil(fill, is_jagged))


def _stencil(mask: Image.Image, is_jagged: bool) -> Image.Image:
    small = mask.reduce(_SUPERSAMPLING)
    return small.point([0] * 128 + [255] * 128) if is_jagged else small


def _draw_text(image: Image.Image, thing: Thing) -> None:
    left, top, right, bottom = (round(value) for value in _pixels(thing, image.size))
    size = (max(1, right - left), max(1, bottom - top))
    # Drawn a little larger than needed and then fitted to the box, whatever the face's metrics.
    font_size = max(12, round(size[1] * 1.6))
    font = load_font(thing.face, font_size - font_size % 4)
    ink = font.getbbox(thing.text)
    mask = Image.new("L", (round(ink[2] - ink[0]), round(ink[3] - ink[1])))
    ImageDraw.Draw(mask).text((-ink[0], -ink[1]), thing.text, fill=255, font=font)
    image.paste(thing.rgb, (left, top), mask.resize(size, Image.Resampling.LANCZOS))


def _pixels(thing: Thing, size: tuple[int, int]) -> tuple[float, float, float, float]:
    left, top, right, bottom = thing.box
    return left * size[0], top * size[1], right * size[0], bottom * size[1]


def _worn(image: Image.Image, scene: Scene, noise: np.random.Generator) -> Image.Image:
    wear = scene.wear
    if wear.blur:
        image = image.filter(ImageFilter.GaussianBlur(wear.blur * min(image.size)))
    if wear.noise:
        grain = noise.standard_normal((image.height, image.width, 1), dtype=np.float32) * wear.noise
        pixels = np.asarray(image, dtype=np.float32) + grain
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if wear.jpeg_quality:
        data = io.BytesIO()
        image.save(data, "JPEG", quality=wear.jpeg_quality)
        image = Image.open(data).convert("RGB")
    return image
