#!/bin/sh
# Generates the Python messages and stubs of proto/kestrel into a folder, by default in the client package, and the
# messages of proto/compat into another, by default in the server.
#
#   PYTHON=python3 sh proto/generate.sh [FOLDER [COMPAT_FOLDER]]
#
# The descriptors keep the package kestrel.v1; only the Python imports move, to kestrel_client.v1, because `kestrel` is
# the import name of another package. The messages of proto/compat get a descriptor pool of their own: packages of
# others define the same names, and one pool refuses the second definition.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${1:-"$root/clients/python/kestrel_client/v1"}
compat=${2:-"$root/kestrel_grpc/frontends/triton/v2"}
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

"${PYTHON:-python3}" -m grpc_tools.protoc --proto_path="$root/proto/compat" \
    --python_out="$scratch" --pyi_out="$scratch" "$root"/proto/compat/inference/*.proto

mkdir -p "$compat"
rm -f "$compat"/*_pb2.py "$compat"/*_pb2.pyi
for file in "$scratch"/inference/*; do
    sed 's/_descriptor_pool\.Default()/_descriptor_pool.DescriptorPool()/' "$file" >"$compat/$(basename "$file")"
done
