#!/bin/sh
# grpclib 0.4.9 sends other deadlines than it was given: above 10 s it drops the fraction, so that a server ends a call
# up to a second before its client does; from 100,000,000 s on it writes more than the eight digits that gRPC over
# HTTP/2 allows ("no limit" as a large number; the server of grpcio takes nine).
#
# Seen: "10.9 s: 10S", "9.99 s: 9990m", "100000000 s: 100000000S", and of 10.9 s the server of grpcio sees at most 10.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpclib==0.4.9 grpcio==1.81.1 grpcio-health-checking==1.81.1
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import sys
from concurrent import futures

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.metadata import encode_timeout

remaining = []


class Health(health_pb2_grpc.HealthServicer):
    def Check(self, request, context):
        remaining.append(context.time_remaining())
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


async def ask(port, timeout):
    channel = Channel("127.0.0.1", port)
    method = UnaryUnaryMethod(
        channel, "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    )
    await method(health_pb2.HealthCheckRequest(), timeout=timeout)
    channel.close()


server = grpc.server(futures.ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
asyncio.run(ask(port, 10.9))
server.stop(None)
written = {timeout: encode_timeout(timeout) for timeout in (10.9, 9.99, 100_000_000)}
print("grpclib 0.4.9")
for timeout, text in written.items():
    print(f"{timeout} s: {text}")
print(f"of 10.9 s the server sees {remaining[0]:.1f}")
sys.exit(not ([*written.values()] == ["10S", "9990m", "100000000S"] and remaining[0] <= 10.0))
PYTHON
