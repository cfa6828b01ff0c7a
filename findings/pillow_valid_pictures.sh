#!/bin/sh
# Pillow 13.0.0 opens these valid files without an error, and with other pixels than libpng, libtiff and Chromium.
# Installs Pillow in a temporary folder; needs python3 with venv. Exits 1 if a behaviour is no longer the one below.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pillow==13.0.0
"$folder/venv/bin/python" - <<'PYTHON'
import io, struct, sys, zlib
from PIL import Image


def opened(data):
    return Image.open(io.BytesIO(data))


def png(bits, colour_type, row, clear):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    width = len(row) * 8 // bits // (3 if colour_type == 2 else 1)
    header = struct.pack(">IIBBBBB", width, 1, bits, colour_type, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"tRNS", clear) + chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def tiff(strips, width, tags):
    values = {256: [width], 257: [1], 258: [8], 259: [1], 262: [1], 277: [1], 278: [1], **tags}
    values |= {273: [0] * len(strips), 279: [len(strip) for strip in strips]}
    place = 8 + 2 + 12 * len(values) + 4
    values[273] = []
    for strip in strips:
        values[273].append(place)
        place += len(strip)
    directory, longer = struct.pack("<H", len(values)), b""
    for number in sorted(values):
        kind = 5 if number == 532 else 4 if number in (273, 279) else 3
        count = len(values[number]) // 2 if kind == 5 else len(values[number])
        content = struct.pack(f"<{len(values[number])}{'H' if kind == 3 else 'I'}", *values[number])
        if len(content) > 4:
            content, longer = struct.pack("<I", place + len(longer)), longer + content + bytes(len(content) % 2)
        directory += struct.pack("<HHI", number, kind, count) + content.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4) + b"".join(strips) + longer


changed = []


def check(what, found, wanted):
    print(f"{what}: {found}")
    if found != wanted:
        changed.append(f"{what}: {found}, was {wanted}")


# 8 bits per pixel, a palette of black and white (biClrUsed is 2): read as one bit per pixel. Chromium: 255 0 255 0.
pixels = bytes((1, 0, 1, 0))
bmp = b"BM" + struct.pack("<IHHI", 66, 0, 0, 62) + struct.pack("<IiiHHIIiiII", 40, 4, 1, 1, 8, 0, 4, 0, 0, 2, 0)
check("BMP", list(opened(bmp + bytes((0, 0, 0, 0, 255, 255, 255, 0)) + pixels).convert("L").tobytes()), [0, 0, 0, 0])

# The transparent colour is 2 of 0 to 3; pixels are scaled to 0 to 255 and the colour is not. libpng: 255 255 0 255.
grey = opened(png(2, 0, bytes((0b00011011,)), b"\0\2")).convert("RGBA")
check("PNG, 2 bits", list(grey.getchannel("A").tobytes()), [255, 255, 255, 255])

# 16 bits per channel: the low byte of the transparent colour is compared with the high byte of pixels. libpng: 0 255.
deep = opened(png(16, 2, struct.pack(">6H", *[0x1234] * 3, *[0x3456] * 3), struct.pack(">3H", *[0x1234] * 3)))
check("PNG, 16 bits", list(deep.convert("RGBA").getchannel("A").tobytes()), [255, 0])

# RGB of 16 bits in planes, uncompressed: planes are read as bytes. libtiff: (16, 32, 48), (80, 96, 112).
planes = [struct.pack("<2H", *pair) for pair in ((0x1000, 0x5000), (0x2000, 0x6000), (0x3000, 0x7000))]
rgb = opened(tiff(planes, 2, {258: [16] * 3, 262: [2], 277: [3], 284: [2]}))
check("TIFF, planes of 16 bits", list(rgb.tobytes()), [0, 0, 0, 16, 32, 48])

# Grey with white as zero is inverted in one plane for all samples, and not in a plane of its own. libtiff: 255 0.
check("TIFF, a plane", list(opened(tiff([b"\0\xff"], 2, {262: [0], 284: [2]})).tobytes()), [0, 255])

# ReferenceBlackWhite (16 is black, 235 white) is obeyed with Deflate alone. libtiff: 0 255 in both.
pixels, ranges = bytes((16, 128, 128, 235, 128, 128)), [16, 1, 235, 1, 128, 1, 240, 1, 128, 1, 240, 1]
for compression, data, wanted in ((1, pixels, [16, 235]), (8, zlib.compress(pixels), [0, 255])):
    tags = {258: [8] * 3, 259: [compression], 262: [6], 277: [3], 530: [1, 1], 532: ranges}
    found = opened(tiff([data], 2, tags)).convert("RGB").getchannel("G").tobytes()
    check(f"TIFF, YCbCr, compression {compression}", list(found), wanted)

for line in changed:
    print(f"changed: {line}")
sys.exit(bool(changed))
PYTHON
