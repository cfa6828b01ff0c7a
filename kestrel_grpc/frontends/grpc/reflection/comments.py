"""The comments of the contract, for reflection: the generated modules have none of them.

`make proto` writes `comments.binpb.zlib`: a compressed `FileDescriptorSet` with only names and comments left.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, SourceCodeInfo


class CommentedPool:
    """A pool of descriptors whose files are served with the comments of the contract.

    It has what `grpc_reflection` asks of a pool.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def FindFileByName(self, name: str) -> CommentedFile:  # noqa: N802 -- as the pool's
        """The file of this name. Raises KeyError."""
        return CommentedFile(self._pool.FindFileByName(name))

    def FindFileContainingSymbol(self, symbol: str) -> CommentedFile:  # noqa: N802 -- as the pool's
        """The file that defines a symbol. Raises KeyError."""
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
    """The descriptor of a file and of those that it imports, as far as reflection reads them."""

    def __init__(self, file: Any) -> None:
        self.name: str = file.name
        self._file = file

    @property
    def dependencies(self) -> list[CommentedFile]:
        """The files that it imports."""
        return [CommentedFile(file) for file in self._file.dependencies]

    def CopyToProto(self, message: FileDescriptorProto) -> None:  # noqa: N802 -- as a descriptor's
        """Write the descriptor, comments included, into a message."""
        self._file.CopyToProto(message)
        comments = _comments().get(self.name)
        if comments is not None:
            message.source_code_info.CopyFrom(comments)


@cache
def _comments() -> dict[str, SourceCodeInfo]:
    """The comments of each file."""
    packed = files("kestrel_grpc.frontends.grpc.reflection").joinpath("comments.binpb.zlib").read_bytes()
    commented = FileDescriptorSet.FromString(zlib.decompress(packed))
    return {file.name: file.source_code_info for file in commented.file}
