"""Image files as cameras write them, and what becomes of them in bad hands. `decode` is what must hold for each."""

import io
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.imaging.formats import FORMATS
from tests.fuzzing.cost import measured
from tests.fuzzing.hostile import hostile

MAX_PIXELS = 250_000
MAX_CPU_S, MAX_ADDED_BYTES = 3.0, 64 * 2**20
"""What decoding a file of at most so many pixels may cost. Most take a few milliseconds and 5 MiB."""
# Where a length, a count or an offset stands, these are the values that break readers.
_EDGES = (
    b"\x00\x00",
    b"\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\x00\x00\x00\x01",
)


def decode(data: bytes) -> str:
    """What decoding says of these bytes: the picture's shape is right, or they are refused in our own words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with measured() as cost:
            outcome = _decode(data)
    assert cost.cpu_s < MAX_CPU_S, f"{cost.cpu_s:.1f} s"
    assert cost.added_bytes < MAX_ADDED_BYTES, f"{cost.added_bytes / 2**20:.0f} MiB"
    return outcome


def _decode(data: bytes) -> str:
    try:
        image = decode_image(data, max_image_pixels=MAX_PIXELS)
    except ImageError as error:
        return "too large" if error.too_large else "refused"
    assert image.mode == "RGB"
    assert 0 < image.width * image.height <= MAX_PIXELS
    return "decoded"


@lru_cache
def seeds() -> tuple[bytes, ...]:
    """Good files: every format that is served, in its variants."""
    rgb = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
    grey16 = Image.fromarray(np.arange(960, dtype=np.uint16).reshape(24, 40) * 60)
    palette, alpha = rgb.quantize(8), rgb.convert("RGBA")
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    frames: dict[str, Any] = {"save_all": True, "append_images": [rgb.rotate(90), rgb.rotate(180)]}
    variants: list[tuple[Image.Image, str, dict[str, Any]]] = [
        *((rgb, kind, {}) for kind in FORMATS),
        *((rgb, kind, frames) for kind in ("GIF", "WEBP", "PNG", "TIFF")),
        *((rgb, kind, {"exif": exif}) for kind in ("JPEG", "PNG", "WEBP", "TIFF")),
        *((rgb, "TIFF", {"compression": name}) for name in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")),
        *((rgb.convert("1"), "TIFF", {"compression": name}) for name in ("group3", "group4")),
        (rgb, "JPEG", {"progressive": True, "icc_profile": b"no profile" * 20}),
        (rgb.convert("CMYK"), "JPEG", {}),
        (rgb.convert("L"), "BMP", {}),
        (rgb, "WEBP", {"lossless": True}),
        (alpha, "WEBP", {}),
        (alpha, "PNG", {"interlace": 1}),
        (palette, "PNG", {"transparency": 1}),
        (palette, "GIF", {"transparency": 0}),
        (grey16, "PNG", {}),
        (grey16, "PNG", {"transparency": 120}),
        *((grey16, "TIFF", {"tiffinfo": info}) for info in ({262: 0}, {281: 32767}, {262: 0, 284: 2})),
        (grey16, "TIFF", {"tiffinfo": {262: 0}, "compression": "tiff_lzw"}),
        (rgb.convert("YCbCr"), "TIFF", {}),
        (grey16, "TIFF", {}),
    ]
    return tuple(_encoded(*variant) for variant in variants)


def _encoded(image: Image.Image, kind: str, options: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@st.composite
def damaged(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """A good file after a few accidents: bytes changed, lost, repeated, cut off, or taken from another file."""
    data = bytearray(draw(good))
    accidents: tuple[Callable[[int], None], ...] = (
        lambda at: data.__setitem__(slice(at, at + 1), draw(st.binary(min_size=1, max_size=1))),
        lambda at: data.__setitem__(slice(at, at + 4), draw(st.sampled_from(_EDGES))),
        lambda at: data.__delitem__(slice(at, at + draw(st.integers(1, 64)))),
        lambda at: data.__setitem__(slice(at, at), data[at : at + draw(st.integers(1, 64))]),
        lambda at: data.__delitem__(slice(at, None)),
        lambda at: data.__setitem__(slice(at, at), draw(good)[at : at + draw(st.integers(1, 200))]),
        lambda at: data.__setitem__(slice(at, at), draw(st.binary(max_size=16))),
    )
    for _ in range(draw(st.integers(0, 6))):
        # Headers decide most, and stand in front.
        within = min(len(data), draw(st.sampled_from((64, 256, 1 << 20))))
        draw(st.sampled_from(accidents))(draw(st.integers(0, within)))
    return bytes(data)


images = st.one_of(damaged(st.sampled_from(seeds())), st.binary(max_size=256), hostile, damaged(hostile))
"""Bytes where an image should be."""
