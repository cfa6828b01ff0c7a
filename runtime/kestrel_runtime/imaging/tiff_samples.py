"""Decodes the TIFF files that Pillow reads wrongly or not at all: their samples, to 8-bit RGB.

These are grey files whose zero is white, files with other bits than 8 or 16 per sample or with fewer significant
bits (MaxSampleValue), and grey with alpha. Pillow decompresses: it reads a file with the same strips or tiles, and
with a directory that describes each row as bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO

import numpy as np
from PIL import Image

from kestrel_runtime.imaging import tiff
from kestrel_runtime.imaging.header import undecodable

_SHORT, _LONG = 3, 4
_DEFLATE, _GREY = 8, 1
_PIXELS_AT_A_TIME = 2**18

_Entries = dict[int, tuple[int, int, bytes]]
"""The tags of a directory: type, number of values, and the values."""


def decode(data: bytes, layout: tiff.Samples, open_file: Callable[[bytes], BytesIO]) -> Image.Image:
    """Decodes the samples of a file to RGB, not turned: transparency over white.

    `open_file` makes a file object of a file. Raises what Pillow raises for a damaged file.
    """
    planes = [_rows_of(data, layout, plane, open_file) for plane in range(layout.num_planes)]
    max_value = 2**layout.bits - 1
    if layout.max_value < max_value:
        # The tag holds statistics in some files. Where a sample exceeds it, all bits are significant.
        highest = max(int(samples.max()) for _, samples in _strips(planes, layout))
        if highest <= layout.max_value:
            max_value = layout.max_value
    result = Image.new("RGB", (layout.width, layout.height))
    for top, samples in _strips(planes, layout):
        result.paste(_rgb(_eight_bits(samples, max_value), layout), (0, top))
    return result


def rewrapped(data: bytes) -> bytes:
    """Returns an uncompressed file with its strips wrapped as Deflate, which compresses nothing.

    Pillow leaves the meaning of compressed samples to libtiff, which knows subsampled colours and their ranges.
    """
    directory = tiff.first_directory(data)
    offsets_tag, lengths_tag = tiff.part_tags(directory)
    starts, lengths = directory.numbers(offsets_tag), directory.numbers(lengths_tag)
    if len(starts) != len(lengths):
        raise undecodable()
    view = memoryview(data)
    parts = [zlib.compress(view[start : start + length], 0) for start, length in zip(starts, lengths, strict=True)]
    entries: _Entries = {number: directory.entry(number) for number in tiff.DESCRIPTION if number in directory}
    order = directory.byte_order
    new_starts, position = [], 8
    for part in parts:
        new_starts.append(position)
        position += len(part) + len(part) % 2
    entries[tiff.COMPRESSION] = _numbers(order, [_DEFLATE], _SHORT)
    entries[offsets_tag] = _numbers(order, new_starts)
    entries[lengths_tag] = _numbers(order, [len(part) for part in parts])
    body = [piece for part in parts for piece in (part, b"\0" * (len(part) % 2))]
    return b"".join((data[:4], struct.pack(f"{order}I", position), *body, _directory(order, entries, position)))


def _rows_of(data: bytes, layout: tiff.Samples, plane: int, open_file: Callable[[bytes], BytesIO]) -> Image.Image:
    """Returns the bytes of one plane as a grey image, each row as long as its bytes are."""
    directory = tiff.first_directory(data)
    order, bits = directory.byte_order, layout.bits * layout.samples_per_plane
    offsets_tag, lengths_tag = tiff.part_tags(directory)
    entries: _Entries = {
        tiff.WIDTH: _numbers(order, [-(-layout.width * bits // 8)]),
        tiff.HEIGHT: _numbers(order, [layout.height]),
        tiff.BITS: _numbers(order, [8], _SHORT),
        tiff.PHOTOMETRIC: _numbers(order, [_GREY], _SHORT),
        tiff.SAMPLES: _numbers(order, [1], _SHORT),
    }
    for number in (tiff.COMPRESSION, tiff.FILL_ORDER, tiff.ROWS_PER_STRIP, tiff.TILE_HEIGHT):
        if number in directory:
            entries[number] = directory.entry(number)
    for number in (offsets_tag, lengths_tag):
        values = directory.numbers(number)
        each = len(values) // layout.num_planes
        if values:
            entries[number] = _numbers(order, values[plane * each : (plane + 1) * each])
    if layout.tile_width:
        if layout.tile_width * bits % 8:
            raise undecodable()
        entries[tiff.TILE_WIDTH] = _numbers(order, [layout.tile_width * bits // 8])
    position = len(data) + len(data) % 2
    pieces = (data[:4], struct.pack(f"{order}I", position), memoryview(data)[8:], b"\0" * (len(data) % 2))
    file = open_file(b"".join((*pieces, _directory(order, entries, position))))
    image = Image.open(file, formats=("TIFF",))
    image.load()
    image.fp = None
    return image


def _strips(planes: list[Image.Image], layout: tiff.Samples) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the samples, some rows at a time: the first row, and unsigned [rows, width, samples]."""
    rows = max(1, _PIXELS_AT_A_TIME // (layout.width * layout.num_samples))
    for top in range(0, layout.height, rows):
        box = (top, min(top + rows, layout.height))
        parts = [_samples(np.asarray(plane.crop((0, box[0], plane.width, box[1]))), layout) for plane in planes]
        yield top, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


def _samples(rows: np.ndarray, layout: tiff.Samples) -> np.ndarray:
    """Returns the samples of one plane: uint8 or uint16 [rows, width, samples], of the bytes of the rows."""
    each = layout.samples_per_plane
    num_samples = layout.width * each
    if layout.bits == 8:
        samples = rows[:, :num_samples]
    elif layout.bits == 16:
        samples = np.ascontiguousarray(rows[:, : 2 * num_samples]).view(f"{layout.byte_order}u2")
    else:
        bits = np.unpackbits(rows, axis=1, count=num_samples * layout.bits)
        weights = 1 << np.arange(layout.bits, dtype=np.uint16)[::-1]
        samples = bits.reshape(len(rows), num_samples, layout.bits) @ weights
    samples = samples.reshape(len(rows), layout.width, each)
    if not layout.is_predicted:
        return samples
    # Each sample is stored as the difference from its left neighbour, anew in each tile.
    kind = np.uint8 if layout.bits == 8 else np.uint16
    width = layout.tile_width or layout.width
    spans = [samples[:, left : left + width] for left in range(0, layout.width, width)]
    return np.concatenate([span.cumsum(axis=1, dtype=kind) for span in spans], axis=1)


def _eight_bits(samples: np.ndarray, max_value: int) -> np.ndarray:
    """Scales samples of 0 to a maximum, 2ⁿ - 1, to uint8: they keep their high bits."""
    bits = max_value.bit_length()
    if bits >= 8:
        return (samples >> (bits - 8)).astype(np.uint8)
    return (samples.astype(np.uint16) * 255 // max_value).astype(np.uint8)


def _rgb(samples: np.ndarray, layout: tiff.Samples) -> Image.Image:
    """Returns an RGB image of uint8 [rows, width, samples]: colours over white, by the alpha if there is one."""
    colours = np.ascontiguousarray(samples[..., : layout.num_colours])
    alpha = None if layout.alpha_sample is None else samples[..., layout.alpha_sample, None].astype(np.uint16)
    if layout.num_colours == 4:
        size = (layout.width, len(samples))
        colours = np.asarray(Image.frombytes("CMYK", size, colours.tobytes()).convert("RGB"))
    if layout.white_is_zero:
        # Where colours are multiplied by the alpha, white is as large as the alpha is.
        colours = (
            255 - colours if alpha is None or not layout.is_premultiplied else alpha - np.minimum(colours, alpha)
        )
    if alpha is not None:
        if layout.is_premultiplied:
            colours = np.minimum(colours + (255 - alpha), 255).astype(np.uint8)
        else:
            colours = ((colours * alpha.astype(np.uint32) + (255 - alpha) * 255 + 127) // 255).astype(np.uint8)
    return Image.fromarray(colours[..., 0]).convert("RGB") if colours.shape[2] == 1 else Image.fromarray(colours)


def _numbers(byte_order: str, values: list[int] | tuple[int, ...], kind: int = _LONG) -> tuple[int, int, bytes]:
    form = {_SHORT: "H", _LONG: "I"}[kind]
    return kind, len(values), struct.pack(f"{byte_order}{len(values)}{form}", *values)


def _directory(byte_order: str, entries: _Entries, position: int) -> bytes:
    """Returns a directory that begins at a position of its file, with its longer values behind it."""
    head, longer = [struct.pack(f"{byte_order}H", len(entries))], []
    position += 2 + 12 * len(entries) + 4
    for number, (kind, count, values) in sorted(entries.items()):
        if len(values) <= 4:
            place = values.ljust(4, b"\0")
        else:
            place = struct.pack(f"{byte_order}I", position)
            longer.append(values + b"\0" * (len(values) % 2))
            position += len(longer[-1])
        head.append(struct.pack(f"{byte_order}HHI", number, kind, count) + place)
    return b"".join((*head, bytes(4), *longer))
