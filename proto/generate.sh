#!/bin/sh
# Generates the Python messages and stubs of proto/ into a folder, by default the client package.
#
#   PYTHON=python3 sh proto/generate.sh [FOLDER]
#
# The descriptors keep the package kestrel.v1; only the Python imports move, to kestrel_client.v1, because `kestrel` is
# the import name of another package.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${1:-"$root/clients/python/kestrel_client/v1"}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"${PYTHON:-python3}" -m grpc_tools.protoc --proto_path="$root/proto" \
    --python_out="$scratch" --pyi_out="$scratch" --grpc_python_out="$scratch" "$root"/proto/kestrel/v1/*.proto

mkdir -p "$target"
rm -f "$target"/*_pb2.py "$target"/*_pb2.pyi "$target"/*_pb2_grpc.py
for file in "$scratch"/kestrel/v1/*; do
    case $file in
    # A file without a service has no stubs.
    *_pb2_grpc.py) grep -q '^class ' "$file" || continue ;;
    esac
    sed 's/^from kestrel\.v1 import /from kestrel_client.v1 import /' "$file" >"$target/$(basename "$file")"
done
