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
$tools/bin/uv pip compile pyproject.toml --extra gpu --extra otel --extra remote --quiet --generate-hashes \
    --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_31 --constraint $tools/tested.txt \
    --no-emit-package kestrel-grpc-client --custom-compile-command 'make supply' --output-file deploy/requirements.lock

# Licences are read from installed packages, so those of what .venv lacks are not in the table.
sed -n 's/^\([a-z0-9.-]*\)==.*/\1/p' deploy/requirements.lock >$tools/names.txt
# shellcheck disable=SC2046  # one argument for each name
$tools/bin/pip-licenses --python "$python" --format=markdown --no-version --with-system --order=name \
    --packages $(cat $tools/names.txt) >deploy/licences.md

PYTHONWARNINGS=ignore::UserWarning $tools/bin/cyclonedx-py requirements deploy/requirements.lock --pyproject pyproject.toml \
    --output-reproducible --validate --output-file $tools/sbom.json
