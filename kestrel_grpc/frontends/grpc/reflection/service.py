"""Server reflection in both versions, v1 and v1alpha: the same messages under two package names.

The descriptors come from a separate pool, which holds the served services and nothing else of the process. They are
served with the comments of the contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from kestrel_grpc.frontends.grpc.interceptors import AdmittedServices
from kestrel_grpc.frontends.grpc.reflection.comments import CommentedPool

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(services: AdmittedServices, files: Iterable[Any]) -> None:
    """Serve reflection about the descriptors `files`, every service in them, and reflection itself."""
    pool = DescriptorPool()
    names = [V1, V1ALPHA]
    for file in (*files, reflection_pb2.DESCRIPTOR):
        _add(pool, file)
        names += [service.full_name for service in file.services_by_name.values()]
    pool.Add(_as_v1(reflection_pb2.DESCRIPTOR))
    # Its handler ignores the context, and so can be given a `CallContext`.
    handler: Any = grpc.stream_stream_rpc_method_handler(
        aio.ReflectionServicer(frozenset(names), CommentedPool(pool)).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1, V1ALPHA):
        services.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})


def _add(pool: DescriptorPool, file: Any) -> None:
    for dependency in file.dependencies:
        _add(pool, dependency)
    pool.AddSerializedFile(file.serialized_pb)


def _as_v1(file: Any) -> FileDescriptorProto:
    """The same file under the package of version 1."""
    text = str(FileDescriptorProto.FromString(file.serialized_pb))
    return text_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())
