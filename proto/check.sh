#!/bin/sh
# Checks the contract: its style, that it breaks no caller of main, and that the stubs in the tree are its own.
#
#   PYTHON=python3 BUF=buf sh proto/check.sh
set -eu

cd "$(dirname -- "$0")/.."
buf=${BUF:-buf}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$buf" lint
"$buf" build --output /dev/null

# Only what main already promises can be broken. An export instead of buf's own reading of the repository works in
# shallow clones too; outside a repository, or before a first commit, there is nothing to compare with.
compared=
for branch in origin/main main; do
    if git rev-parse --quiet --verify "$branch:proto" >/dev/null 2>&1; then
        mkdir "$scratch/main"
        git archive "$branch" buf.yaml proto | tar -x -C "$scratch/main"
        "$buf" breaking --against "$scratch/main"
        compared=$branch
        break
    fi
done
echo "proto: compared with ${compared:-nothing, there is no branch main}"

sh proto/generate.sh "$scratch/v1" "$scratch/v2" "$scratch/orca" "$scratch/comments.binpb.zlib"
# Unpacked, since not every zlib packs alike.
if ! "${PYTHON:-python3}" -c 'import sys, zlib; sys.exit(len({zlib.decompress(open(f, "rb").read()) for f in sys.argv[1:]}) - 1)' \
    kestrel_grpc/frontends/grpc/comments.binpb.zlib "$scratch/comments.binpb.zlib"; then
    echo "proto: the comments are not those of proto/; run make proto and commit what it writes" >&2
    exit 1
fi
for folder in clients/python/kestrel_client/v1 kestrel_grpc/frontends/triton/v2 kestrel_grpc/frontends/grpc/orca; do
    if ! diff -r -x __init__.py -x __pycache__ "$folder" "$scratch/$(basename "$folder")"; then
        echo "proto: the stubs are not those of proto/; run make proto and commit what it writes" >&2
        exit 1
    fi
done
