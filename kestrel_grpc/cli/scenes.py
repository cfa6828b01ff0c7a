"""Draws pictures of several kinds and shapes, with a question and an object for each: shapes, a chart, a street and
a receipt.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

_PAPER, _INK = "#ffffff", "#222222"
_SALES = (("Jan", 23), ("Feb", 41), ("Mar", 35), ("Apr", 58), ("May", 47), ("Jun", 30))
_ITEMS = (("Bread", "3.20"), ("Apples", "4.75"), ("Coffee", "8.90"), ("Cheese", "6.15"), ("Tea", "5.40"))
_TOTAL = "28.40"


class Scene(NamedTuple):
    """Holds a drawn picture as a PNG file, with a question and an object."""

    name: str
    data: bytes
    question: str
    object: str
    """The object to find in it."""


def scenes() -> Iterator[Scene]:
    """Yields all pictures, the same in every call."""
    shapes = files("kestrel_grpc").joinpath("demo_picture.png").read_bytes()
    yield Scene("shapes.png", shapes, "How many shapes are there?", "star")
    yield Scene("chart.png", _png(_chart()), "What is the value of the tallest bar?", "tallest bar")
    yield Scene("street.png", _png(_street()), "What color is the car?", "car")
    yield Scene("receipt.png", _png(_receipt()), "What is the total?", "price of the coffee")


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _chart() -> Image.Image:
    picture = Image.new("RGB", (800, 600), _PAPER)
    pencil = ImageDraw.Draw(picture)
    pencil.text((400, 40), "Sales by month", _INK, ImageFont.load_default(34), anchor="mm")
    pencil.line((80, 80, 80, 520, 760, 520), _INK, 3)
    for place, (month, value) in enumerate(_SALES):
        left, top = 110 + 108 * place, 520 - 7 * value
        pencil.rectangle((left, top, left + 70, 518), "#2f6fb3")
        pencil.text((left + 35, top - 18), str(value), _INK, ImageFont.load_default(24), anchor="mm")
        pencil.text((left + 35, 548), month, _INK, ImageFont.load_default(24), anchor="mm")
    return picture


def _street() -> Image.Image:
    picture = Image.new("RGB", (1024, 640), "#9ed0f0")
    pencil = ImageDraw.Draw(picture)
    pencil.circle((880, 110), 60, "#ffd23f")
    pencil.rectangle((0, 400, 1024, 640), "#6fae57")
    pencil.rectangle((0, 460, 1024, 600), "#555a60")
    for left in range(20, 1024, 160):
        pencil.rectangle((left, 524, left + 80, 534), _PAPER)
    pencil.rectangle((150, 290, 180, 440), "#7a4a24")
    pencil.circle((165, 240), 90, "#2f7d32")
    pencil.rectangle((650, 200, 900, 440), "#d9a066")
    pencil.polygon(((630, 200), (920, 200), (775, 100)), "#a5402d")
    pencil.rectangle((750, 330, 810, 440), "#5b3a1e")
    pencil.text((775, 250), "MARKET", _INK, ImageFont.load_default(44), anchor="mm")
    pencil.polygon(((360, 450), (400, 400), (520, 400), (560, 450)), "#c3dff0", "#b3202c", 8)
    pencil.rounded_rectangle((300, 445, 620, 520), 24, "#d22f3c")
    for centre in (375, 545):
        pencil.circle((centre, 520), 34, _INK)
        pencil.circle((centre, 520), 14, "#bbbbbb")
    return picture


def _receipt() -> Image.Image:
    picture = Image.new("RGB", (420, 900), "#f7f5ee")
    pencil = ImageDraw.Draw(picture)
    pencil.text((210, 70), "CORNER SHOP", _INK, ImageFont.load_default(40), anchor="mm")
    pencil.text((210, 120), "12 Mill Street", _INK, ImageFont.load_default(24), anchor="mm")
    for place, (item, price) in enumerate((*_ITEMS, ("TOTAL", _TOTAL))):
        y = 220 + 80 * place + (40 if item == "TOTAL" else 0)
        font = ImageFont.load_default(36 if item == "TOTAL" else 28)
        pencil.text((40, y), item, _INK, font, anchor="lm")
        pencil.text((380, y), price, _INK, font, anchor="rm")
    pencil.line((40, 615, 380, 615), _INK, 3)
    pencil.text((210, 820), "Thank you", _INK, ImageFont.load_default(28), anchor="mm")
    return picture
