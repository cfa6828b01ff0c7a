#!/bin/sh
# opentelemetry-instrumentation-grpc 0.66b2 breaks streaming handlers of grpc.aio that write by `context.write`: its
# interceptor treats every handler of a stream as an asynchronous generator. `Health.Watch` of grpcio-health-checking,
# which load balancers call, is such a handler: it fails with UNKNOWN, while `Check` and unary handlers go on.
#
# Seen: "without: Check 1, Watch 1", "with: Check 1, Watch UNKNOWN".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpcio==1.81.1 grpcio-health-checking==1.81.1 \
    opentelemetry-instrumentation-grpc==0.66b2 opentelemetry-sdk==1.45.2
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import asyncio
import sys

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from opentelemetry.instrumentation.grpc import aio_server_interceptor


async def asked(interceptors):
    server, servicer = aio.server(interceptors=interceptors), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        checked = (await stub.Check(request)).status
        call = stub.Watch(request)
        try:
            watched = (await call.read()).status
        except aio.AioRpcError as error:
            watched = error.code().name
        call.cancel()
    await server.stop(None)
    return checked, watched


without, with_it = asyncio.run(asked([])), asyncio.run(asked([aio_server_interceptor()]))
print("opentelemetry-instrumentation-grpc 0.66b2")
print(f"without: Check {without[0]}, Watch {without[1]}\nwith: Check {with_it[0]}, Watch {with_it[1]}")
sys.exit((without, with_it) != ((1, 1), (1, "UNKNOWN")))
PYTHON
