#!/bin/sh
# safetensors 0.8.0 saves an array of NumPy that is a transposed, strided or column-major view with other values than
# the array has, without an error: it writes the bytes where the data begins, in the order of memory. 0.7.0 wrote the
# values. An adapter or a checkpoint that is transposed by `.T` and saved by safetensors.numpy is wrong without a sign.
#
# Seen: "0.8.0: transposed False, every second column False, column-major False", "0.7.0: … True, … True, … True".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat >"$folder/views.py" <<'PYTHON'
import numpy as np
import safetensors
from safetensors.numpy import load, save

whole = np.arange(6, dtype=np.float32).reshape(2, 3)
views = {"transposed": whole.T, "every second column": whole[:, ::2], "column-major": np.asfortranarray(whole)}
same = {name: np.array_equal(load(save({"x": view}))["x"], view) for name, view in views.items()}
print(f"{safetensors.__version__}: " + ", ".join(f"{name} {value}" for name, value in same.items()))
raise SystemExit(any(same.values()) if safetensors.__version__ == "0.8.0" else not all(same.values()))
PYTHON
for version in 0.8.0 0.7.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 "safetensors==$version"
    "$folder/venv/bin/python" "$folder/views.py"
done
