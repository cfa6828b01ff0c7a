#!/bin/sh
# betterproto2 0.10.0 writes messages that other libraries of protobuf read as something else:
# - a negative duration with a fraction: the seconds and the nanoseconds have different signs, which the format
#   forbids, and -0.25 s is read as +0.75 s;
# - -0.0 in a field without presence is not written, and is read as +0.0;
# - of two messages that are joined, which is how protobuf merges, a oneof keeps both members, and the first is read.
#
# Seen: "-1.5 s is read as -0.5 s, -0.25 s as 0.75 s", "-0.0 is read as 0.0",
# "a oneof set to number and then to text is text, and number after betterproto2".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check betterproto2==0.10.0 betterproto2_compiler==0.10.1 \
    grpcio-tools==1.85.1 protobuf==7.36.2
cd "$folder"
cat >given.proto <<'PROTO'
syntax = "proto3";
package given;
import "google/protobuf/duration.proto";
message Given {
  google.protobuf.Duration wait = 1;
  float number = 2;
  oneof kind { string text = 3; int64 count = 4; }
}
PROTO
mkdir other
PATH="$folder/venv/bin:$PATH" python -m grpc_tools.protoc -I. --python_out=. --python_betterproto2_out=other given.proto \
    >/dev/null
venv/bin/python - <<'PYTHON'
import sys
from datetime import timedelta

import given_pb2
from other.given import Given


def read(message):
    return given_pb2.Given.FromString(bytes(message))


waits = [read(Given(wait=timedelta(seconds=wait))).wait for wait in (-1.5, -0.25)]
waits = [wait.seconds + wait.nanos / 1e9 for wait in waits]
zero = read(Given(number=-0.0)).number
joined = given_pb2.Given(count=3).SerializeToString() + given_pb2.Given(text="a").SerializeToString()
kinds = [message.WhichOneof("kind") for message in (given_pb2.Given.FromString(joined), read(Given.parse(joined)))]
names = {"count": "number", "text": "text"}
print(f"betterproto2 0.10.0\n-1.5 s is read as {waits[0]} s, -0.25 s as {waits[1]} s\n-0.0 is read as {zero}")
print(f"a oneof set to number and then to text is {names[kinds[0]]}, and {names[kinds[1]]} after betterproto2")
sys.exit(not (waits == [-0.5, 0.75] and str(zero) == "0.0" and kinds == ["text", "count"]))
PYTHON
