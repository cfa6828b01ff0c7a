"""Training curves as a picture: the loss above, every score below."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_SIZE = (1200, 900)
_LEFT, _RIGHT = 70, 240
_HUES = 37  # degrees from one curve to the next, so that neighbours differ


def draw_curves(curves: Mapping[str, Sequence[tuple[int, float]]], file: Path) -> None:
    """Write a PNG of all curves over the steps."""
    image = Image.new("RGB", _SIZE, "white")
    scores = {name: points for name, points in curves.items() if name != "loss"}
    losses = {name: points for name, points in curves.items() if name == "loss"}
    top = max((value for points in losses.values() for _, value in points), default=1.0)
    _panel(image, losses, (40, 340), 0.0, min(top, 8.0), "loss")
    _panel(image, scores, (400, 860), 0.0, 1.0, "answers right on held-out scenes")
    image.quantize(64, dither=Image.Dither.NONE).save(file, optimize=True)  # a third of the bytes


def _panel(
    image: Image.Image,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    rows: tuple[int, int],
    low: float,
    high: float,
    title: str,
) -> None:
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    right = _SIZE[0] - _RIGHT
    last = max((step for points in curves.values() for step, _ in points), default=1)
    pen.text((_LEFT, rows[0] - 22), title, fill="black", font=font)
    for tenth in range(0, 11, 2):
        y = rows[1] - (rows[1] - rows[0]) * tenth / 10
        pen.line([(_LEFT, y), (right, y)], fill=(225, 225, 225))
        pen.text((_LEFT - 45, y - 8), f"{low + (high - low) * tenth / 10:.2f}", fill=(90, 90, 90), font=font)
    for index, (name, points) in enumerate(curves.items()):
        color = f"hsl({index * _HUES * 3 % 360}, 70%, {35 + index % 3 * 10}%)"
        corners = [
            (
                _LEFT + (right - _LEFT) * step / last,
                rows[1] - (rows[1] - rows[0]) * (min(max(value, low), high) - low) / (high - low),
            )
            for step, value in points
        ]
        if len(corners) > 1:
            pen.line(corners, fill=color, width=2)
        label_y = rows[0] + index * (rows[1] - rows[0]) / max(len(curves), 20)
        pen.text((right + 15, label_y), f"{name} {points[-1][1]:.3f}", fill=color, font=font)
    pen.text((right - 60, rows[1] + 6), f"step {last}", fill=(90, 90, 90), font=font)
