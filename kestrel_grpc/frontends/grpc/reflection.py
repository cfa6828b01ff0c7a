"""Serves reflection in both versions, v1 and v1alpha: the same messages under two package names.

The descriptors come from a separate pool, which holds the served services and nothing else of the process. They are
served with the comments of the contract, which generated modules do not have: `make proto` writes them to
`comments.binpb.zlib`, a compressed `FileDescriptorSet` with only names and comments.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, SourceCodeInfo
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from kestrel_grpc.frontends.grpc.method_handlers import AdmittedServices

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(services: AdmittedServices, described: Iterable[Any]) -> None:
    """Serves reflection about the descriptors `described`, every service in them, and reflection itself."""
    pool = DescriptorPool()
    names = [V1, V1ALPHA]
    for file in (*described, reflection_pb2.DESCRIPTOR):
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
    """Returns the file under the package of version 1."""
    text = str(FileDescriptorProto.FromString(file.serialized_pb))
    return text_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())


class CommentedPool:
    """Finds descriptors of files with the comments of the contract, as far as `grpc_reflection` needs it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def FindFileByName(self, name: str) -> CommentedFile:  # noqa: N802 -- as the pool's
        """Returns the file of this name. Raises KeyError."""
        return CommentedFile(self._pool.FindFileByName(name))

    def FindFileContainingSymbol(self, symbol: str) -> CommentedFile:  # noqa: N802 -- as the pool's
        """Returns the file that defines a symbol. Raises KeyError."""
        try:
            file = self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            # The pool knows methods by their service only.
            service, _, method = symbol.rpartition(".")
            file = self._pool.FindServiceByName(service).methods_by_name[method].containing_service.file
        return CommentedFile(file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class CommentedFile:
    """Represents the descriptor of a file and of those that it imports, as far as reflection reads them."""

    def __init__(self, file: Any) -> None:
        self.name: str = file.name
        self._file = file

    @property
    def dependencies(self) -> list[CommentedFile]:
        """The files that it imports."""
        return [CommentedFile(file) for file in self._file.dependencies]

    def CopyToProto(self, message: FileDescriptorProto) -> None:  # noqa: N802 -- as a descriptor's
        """Writes the descriptor, comments included, into a message."""
        self._file.CopyToProto(message)
        comments = _comments().get(self.name)
        if comments is not None:
            message.source_code_info.CopyFrom(comments)


@cache
def _comments() -> dict[str, SourceCodeInfo]:
    """Returns the comments of each file."""
    packed = files("kestrel_grpc.frontends.grpc").joinpath("comments.binpb.zlib").read_bytes()
    commented = FileDescriptorSet.FromString(zlib.decompress(packed))
    return {file.name: file.source_code_info for file in commented.file}
