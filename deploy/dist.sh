#!/usr/bin/env sh
# Builds the wheel and the source distribution of both packages into dist/, as a package index would take them, and checks
# them: the metadata and the descriptions by twine; the wheels, which are built from the source distributions, by
# serving the built-in model from them alone.
set -eu
cd "$(dirname "$0")/.."
python=$(cd "$(dirname "${PYTHON:-.venv/bin/python}")" && pwd)/python
tools=build/dist-tools
test -x $tools/bin/python || "$python" -m venv $tools
$tools/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6'

rm -rf dist
for package in clients/python .; do
    $tools/bin/python -m build --outdir dist "$package"
done
test "$(ls dist | wc -l)" = 4
$tools/bin/twine check --strict dist/*

# What both need is in the environment of the tests; the packages themselves come from the wheels.
rm -rf build/installed
$tools/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/installed dist/*.whl
installed=$PWD/build/installed
cd build
PYTHONPATH=$installed PYTHONNOUSERSITE=1 "$python" -c '
import pathlib, sys, kestrel_client, kestrel_grpc, kestrel_ops, kestrel_runtime
for package in (kestrel_client, kestrel_grpc, kestrel_ops, kestrel_runtime):
    assert pathlib.Path(package.__file__).is_relative_to(sys.argv[1]), package.__file__
' "$installed"
PYTHONPATH=$installed PYTHONNOUSERSITE=1 "$python" -m kestrel_grpc demo --draw dist-demo.png
cd ..
ls -l dist
