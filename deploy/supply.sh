#!/usr/bin/env sh
# Writes anew what says which code a deployment runs: requirements.lock and licences.md beside this file, and the bill
# of materials (CycloneDX) as build/supply/sbom.json.
# The versions are those in .venv, with which the tests passed, except torch and Triton: these are the ones that the
# extra `gpu` pins, with which the GPU was measured. Torch limits setuptools. What .venv lacks (CUDA's libraries) is
# resolved.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
tools=build/supply
test -x $tools/bin/python || "$python" -m venv $tools
$tools/bin/python -m pip install --quiet --disable-pip-version-check \
    'uv>=0.8' 'pip-licenses>=5' 'cyclonedx-bom>=6'

$tools/bin/uv pip freeze --quiet --python "$python" --exclude-editable |
    sed '/^torch==/d; /^triton==/d; /^setuptools==/d' >$tools/tested.txt
$tools/bin/uv pip compile pyproject.toml --extra server --extra gpu --extra otel --extra remote --quiet --generate-hashes \
    --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_31 --constraint $tools/tested.txt \
    --no-emit-package kestrel-grpc-client --custom-compile-command 'make supply' --output-file deploy/requirements.lock
# Of the hashes, those of the wheels that the image installs. The libraries of CUDA, gigabytes of them, keep all of theirs.
# shellcheck disable=SC2046  # one argument for each package
"$python" -m pip install --quiet --dry-run --ignore-installed --no-deps --only-binary :all: --target $tools/none \
    --python-version 3.11 --implementation cp $(printf -- '--platform manylinux%s_x86_64 ' _2_31 _2_28 _2_27 _2_17 2014 _2_5 1) \
    --report $tools/wheels.json \
    $(sed -n 's/^\([a-z0-9._-]*==[^ ]*\) .*/\1/p' deploy/requirements.lock | grep -Ev '^(torch|triton|cuda-|nvidia-)')
"$python" - deploy/requirements.lock $tools/wheels.json <<'END'
import json, re, sys
from pathlib import Path

lock, report = map(Path, sys.argv[1:])
selected = {
    re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["download_info"]["archive_info"]["hashes"]["sha256"]
    for item in json.loads(report.read_text())["install"]
}
kept = []
for entry in re.split(r"\n(?=\S)", lock.read_text().rstrip()):
    head, *hashes = entry.split(" \\\n")
    sha256 = selected.get(head.partition("==")[0], "")
    kept.append(" \\\n".join((head, *(line for line in hashes if line.endswith(sha256)))))
lock.write_text("\n".join(kept) + "\n")
END

# Licences are read from installed packages, so those of what .venv lacks are not in the table.
sed -n 's/^\([a-z0-9.-]*\)==.*/\1/p' deploy/requirements.lock >$tools/names.txt
# shellcheck disable=SC2046  # one argument for each name
$tools/bin/pip-licenses --python "$python" --format=markdown --no-version --with-system --order=name \
    --packages $(cat $tools/names.txt) | sed -E 's/ +\|/ |/g; s/-{4,}/---/g' >deploy/licences.md

PYTHONWARNINGS=ignore::UserWarning $tools/bin/cyclonedx-py requirements deploy/requirements.lock --pyproject pyproject.toml \
    --output-reproducible --validate --output-file $tools/sbom.json
