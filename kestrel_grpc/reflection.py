"""Server reflection in both versions, v1 and v1alpha: the same messages under two package names.

The descriptors are served from a pool of our own, which holds the served services and nothing else of the process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from kestrel_grpc.access import AccessRefused, Metadata
from kestrel_grpc.call import Call
from kestrel_grpc.errors import to_status

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(
    server: grpc.aio.Server, files: Iterable[Any], admit: Callable[[Metadata], None] | None = None
) -> None:
    """Serve reflection about the descriptors `files`, every service in them, and itself.

    `admit` raises an `AccessRefused` for callers that may not ask.
    """
    pool = DescriptorPool()
    names = [V1, V1ALPHA]
    for file in (*files, reflection_pb2.DESCRIPTOR):
        _add(pool, file)
        names += [service.full_name for service in file.services_by_name.values()]
    pool.Add(_as_v1(reflection_pb2.DESCRIPTOR))
    handler: Any = grpc.stream_stream_rpc_method_handler(
        _guarded(aio.ReflectionServicer(frozenset(names), pool).ServerReflectionInfo, admit),
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in (V1, V1ALPHA)]
    )


def _guarded(reflect: Any, admit: Callable[[Metadata], None] | None) -> Any:
    if admit is None:
        return reflect

    async def serve(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        metadata = context.invocation_metadata() or ()
        try:
            admit(metadata)
        except AccessRefused as error:
            status = to_status(error, Call(metadata, None, "").request_id)
            await context.abort(status.code, status.message, status.trailing_metadata)
        async for response in reflect(requests, context):
            yield response

    return serve


def _add(pool: DescriptorPool, file: Any) -> None:
    for dependency in file.dependencies:
        _add(pool, dependency)
    pool.AddSerializedFile(file.serialized_pb)


def _as_v1(file: Any) -> FileDescriptorProto:
    """The same file under the package of version 1."""
    text = str(FileDescriptorProto.FromString(file.serialized_pb))
    return text_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())
