#!/bin/sh
# Generates the Python messages and stubs of proto/kestrel into a folder, by default in the client package, and the
# messages of proto/compat into two others, by default in the server. The comments of services go into a file of their
# own, from which the server's reflection adds them to the descriptors.
#
#   PYTHON=python3 sh proto/generate.sh [FOLDER [COMPAT_FOLDER [ORCA_FOLDER [COMMENTS_FILE]]]]
#
# The descriptors keep the package kestrel.v1; only the Python imports move, to kestrel_client.v1, because `kestrel` is
# the import name of another package. The messages of proto/compat get a descriptor pool of their own: packages of
# others define the same names, and one pool refuses the second definition.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${1:-"$root/clients/python/kestrel_client/v1"}
compat=${2:-"$root/kestrel_grpc/frontends/triton/v2"}
orca=${3:-"$root/kestrel_grpc/frontends/grpc/orca"}
comments=${4:-"$root/kestrel_grpc/frontends/grpc/comments.binpb.zlib"}
# Nothing uses the constants with the numbers of fields, and the experimental classes at the ends of files of stubs.
unused='/_FIELD_NUMBER: _ClassVar\[int\]$/d; /^ # This class is part of an EXPERIMENTAL API\.$/,$d'
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
    sed -e 's/^from kestrel\.v1 import /from kestrel_client.v1 import /' -e "$unused" "$file" >"$target/$(basename "$file")"
done

"${PYTHON:-python3}" -m grpc_tools.protoc --proto_path="$root/proto/compat" \
    --python_out="$scratch" --pyi_out="$scratch" \
    "$root"/proto/compat/inference/*.proto "$root"/proto/compat/xds/data/orca/v3/*.proto

# A folder of generated messages of others, and where to put them.
with_own_pool() {
    mkdir -p "$2"
    rm -f "$2"/*_pb2.py "$2"/*_pb2.pyi
    for file in "$1"/*; do
        sed -e 's/_descriptor_pool\.Default()/_descriptor_pool.DescriptorPool()/' -e "$unused" "$file" >"$2/$(basename "$file")"
    done
}
with_own_pool "$scratch/inference" "$compat"
with_own_pool "$scratch/xds/data/orca/v3" "$orca"

"${PYTHON:-python3}" -m grpc_tools.protoc --proto_path="$root/proto" --proto_path="$root/proto/compat" \
    --include_source_info --descriptor_set_out="$scratch/whole.binpb" \
    "$root"/proto/kestrel/v1/*.proto "$root"/proto/compat/inference/*.proto
"${PYTHON:-python3}" - "$scratch/whole.binpb" "$comments" <<'END'
import sys
import zlib
from google.protobuf.descriptor_pb2 import FileDescriptorSet, SourceCodeInfo

with open(sys.argv[1], "rb") as whole:
    files = FileDescriptorSet.FromString(whole.read())
commented = FileDescriptorSet()
for file in files.file:
    info = SourceCodeInfo()
    for place in file.source_code_info.location:
        if place.leading_comments or place.trailing_comments:
            info.location.append(place)
    commented.file.add(name=file.name, source_code_info=info)
with open(sys.argv[2], "wb") as target:
    target.write(zlib.compress(commented.SerializeToString(deterministic=True), 9))
END
