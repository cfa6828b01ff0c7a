"""Odd valid pictures, and the pixels that other decoders made of them: `valid_pictures.json.xz`.

The table has small files by kind. "by" says which program gave the pixels, over white and upright; it was run once.
Files that are not decoded have the reason of the refusal, which names what they contain. Files and pixels, RGB row
by row, are hexadecimal; `xz -dc` shows the table.
"""

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_runtime.api.errors import ImageError
from tests.runtime.imaging.test_decoding import decode

TABLE = json.loads(lzma.decompress(Path(__file__).with_name("valid_pictures.json.xz").read_bytes()))
KINDS = {kind: pictures for kind, pictures in TABLE["pictures"].items() if kind != "refused"}
REFUSED = TABLE["pictures"]["refused"]
# Programs round differently where they convert colours, mix with white, or drop the lower bits.
TOLERANCE = 3


def fault_of(picture: dict[str, Any]) -> str | None:
    """How the decoded pixels differ from the recorded ones."""
    width, height = picture["size"]
    wanted = np.frombuffer(bytes.fromhex(TABLE["pixels"][picture["pixels"]]), np.uint8).reshape(height, width, 3)
    try:
        found = np.asarray(decode(bytes.fromhex(picture["file"])))
    except ImageError as error:
        return error.violations[0].description
    if found.shape != wanted.shape:
        return f"has the shape {found.shape}, not {wanted.shape}"
    difference = np.abs(found.astype(int) - wanted).max()
    return f"differs by {difference} from {picture['by']}" if difference > TOLERANCE else None


@pytest.mark.parametrize("kind", KINDS)
def test_odd_valid_pictures_have_the_pixels_that_other_decoders_give(kind: str):
    faults = {name: fault_of(picture) for name, picture in KINDS[kind].items()}
    assert {name: fault for name, fault in faults.items() if fault is not None} == {}


def test_pictures_that_are_not_decoded_are_refused_by_what_they_are():
    found = {}
    for name, picture in REFUSED.items():
        with pytest.raises(ImageError) as caught:
            decode(bytes.fromhex(picture["file"]))
        assert not caught.value.too_large
        found[name] = caught.value.violations[0].description
    assert found == {name: picture["reason"] for name, picture in REFUSED.items()}


def test_the_table_says_how_each_picture_was_recorded():
    recorded = {picture["by"] for pictures in KINDS.values() for picture in pictures.values()}
    assert recorded == set(TABLE["by"])
