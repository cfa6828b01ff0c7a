"""Pictures of nothing."""

import io

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def noise_png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    noise(width, height, seed).save(file, "PNG")
    return file.getvalue()
