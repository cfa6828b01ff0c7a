#!/bin/sh
# tritonclient 2.73.0 sends a picture that ends with zero bytes, as a BMP often does, without these bytes if its array
# was made by `np.array([data])`: NumPy's type for that drops zero bytes at the end, and the client accepts the type.
# With `dtype=object` the same picture is sent whole. Arrays of `str` that NumPy makes the same way are refused.
#
# Seen: "a BMP of 78 bytes: 44 sent from |S78, 78 sent from object", "an array of str: refused".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'tritonclient[http]==2.73.0' numpy==2.4.6 pillow==13.0.0
"$folder/venv/bin/python" - <<'PYTHON'
import io
import sys

import numpy as np
from PIL import Image
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

file = io.BytesIO()
Image.new("RGB", (3, 2), "black").save(file, "BMP")
data = file.getvalue()
arrays = [np.array([data]), np.array([data], dtype=object)]
sizes = [len(serialize_byte_tensor(array).item()) - 4 for array in arrays]  # after the length, of four bytes
try:
    serialize_byte_tensor(np.array(["a question"]))
    text = "sent"
except InferenceServerException:
    text = "refused"
sent = ", ".join(f"{size} sent from {array.dtype}" for size, array in zip(sizes, arrays))
print(f"tritonclient 2.73.0, numpy {np.__version__}\na BMP of {len(data)} bytes: {sent}\nan array of str: {text}")
sys.exit(not (sizes == [44, 78] and text == "refused"))
PYTHON
