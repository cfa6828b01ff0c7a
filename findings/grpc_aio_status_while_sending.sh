#!/bin/sh
# grpc.aio of grpcio 1.85.3 reports INTERNAL, "Internal error from Core", in place of the status that the server has
# sent, if the client of a stream is sending a message when the server ends the call. So a client cannot know whether
# it may try again. The blocking client reports the server's status.
#
# Seen: "grpc.aio: 210 of 240 calls end with INTERNAL: Internal error from Core", "grpc: 100 of 100 calls end with
# UNAVAILABLE: what the server says".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.3
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import collections
import sys

import grpc

MESSAGE = bytes(200_000)


class Service(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(serve)


async def serve(requests, context):
    async for _ in requests:
        break
    await asyncio.sleep(0.02)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "what the server says")


async def ask(channel):
    async def messages():
        while True:
            yield MESSAGE

    call = channel.stream_stream("/service/method")(messages())
    try:
        async for _ in call:
            pass
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"


def ask_blocking(channel):
    call = channel.stream_stream("/service/method")(iter(lambda: MESSAGE, None))
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"


async def main():
    server = grpc.aio.server(handlers=(Service(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    seen = collections.Counter()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(20):
            seen.update(await asyncio.gather(*(ask(channel) for _ in range(12))))
    blocking = collections.Counter()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(100):
            blocking[await asyncio.to_thread(ask_blocking, channel)] += 1
    await server.stop(None)
    print(f"grpcio {grpc.__version__}")
    for name, counts in (("grpc.aio", seen), ("grpc", blocking)):
        for text, count in counts.items():
            print(f"{name}: {count} of {counts.total()} calls end with {text}")
    sys.exit(not any(text.startswith("INTERNAL") for text in seen))


asyncio.run(main())
PYTHON
