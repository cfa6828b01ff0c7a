"""Accesses the pixels of a Pillow image without a copy, through the Arrow C data interface.

https://arrow.apache.org/docs/format/CDataInterface.html.
"""

from __future__ import annotations

import ctypes

import numpy as np
from PIL import Image

# A separate function object: the attributes of `ctypes.pythonapi` are shared with all other code.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Array(ctypes.Structure):
    # struct ArrowArray
    _fields_ = (
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    )


def pixels_in_place(image: Image.Image) -> np.ndarray:
    """Read-only uint8 [height, width, 4] of an RGB image: red, green, blue and padding.

    Raises ValueError if Pillow keeps the pixels in several blocks of memory, as it does for large images.
    """
    assert image.mode == "RGB"
    image.load()
    _, capsule = image.__arrow_c_array__()
    pixels = _array_in(capsule)  # a list for each pixel; its child is the array of all bytes
    assert pixels.n_children == 1
    assert pixels.length == image.width * image.height
    data = _Array.from_address(pixels.children[0]).buffers[1]
    memory = (ctypes.c_ubyte * (4 * pixels.length)).from_address(data)
    memory.owner = capsule  # the capsule frees the pixels when it is no longer referenced
    return np.frombuffer(memory, np.uint8).reshape(image.height, image.width, 4)


def _array_in(capsule: object) -> _Array:
    return _Array.from_address(_pointer_of(capsule, b"arrow_array"))
