"""A server without a model: as many pieces of answer as asked for, at once. Shows what a client can do."""

# ruff: noqa: N802 (the servicer's methods bear the names of their RPCs)

import asyncio
import contextlib
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire

_MAX_MESSAGE_BYTES = 64 * 2**20


class _Servicer:
    async def Query(self, message: bytes, context: Any) -> AsyncIterator[bytes]:
        request = wire.QueryRequest.FromString(message)
        num_tokens = request.sampling.max_tokens
        delta = generation_pb2.TextDelta(text=" kestrel", channel="TEXT_CHANNEL_ANSWER", token_count=1)
        piece = wire.QueryResponse(delta=delta).SerializeToString()
        for _ in range(num_tokens):
            yield piece
        usage = generation_pb2.Usage(output_token_count=num_tokens)
        result = wire.QueryResult(answer="", info=generation_pb2.ResponseInfo(usage=usage))
        yield wire.QueryResponse(completed=result).SerializeToString()


@contextlib.contextmanager
def empty_server() -> Iterator[str]:
    """The address of one in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.terminate()
            process.join()


def _run(pipe: Connection) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),))
    handler = grpc.unary_stream_rpc_method_handler(_Servicer().Query)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kestrel.v1.VisionService", {"Query": handler}),)
    )
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(pipe.recv)
    await server.stop(None)
