#!/bin/sh
# numpy 2.4.6 (OpenBLAS 0.3.31): the bits of a row of a float32 product depend on where the row stands, in matrices of
# one shape, with the kernels for AVX2, which processors without AVX-512 get. Padding a batch to a fixed size, the
# usual way to equal answers in any batch, does not suffice there; and a kernel that multiplies rows alike on a GPU
# fails such a test in Triton's interpreter, whose `tl.dot` is numpy's product. `einsum` gives equal bits.
#
# Seen: "rows of 16 that differ from the same row in another place: matmul 14, einsum 0".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
OPENBLAS_CORETYPE=Haswell "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np

chance = np.random.default_rng(0)
rows, weight = (chance.standard_normal(size, np.float32) for size in ((16, 37), (37, 48)))
products = {"matmul": np.matmul, "einsum": lambda left, right: np.einsum("ij,jk->ik", left, right)}


def differ(multiply):
    """How many rows have other bits where all rows stand in another order."""
    order = np.roll(np.arange(16), 5)
    return int((multiply(rows, weight)[order] != multiply(rows[order], weight)).any(axis=1).sum())


found = {name: differ(multiply) for name, multiply in products.items()}
print(
    f"numpy {np.__version__}\nrows of 16 that differ from the same row in another place: "
    + ", ".join(f"{name} {count}" for name, count in found.items())
)
raise SystemExit(not (found["matmul"] > 0 and found["einsum"] == 0))
PYTHON
