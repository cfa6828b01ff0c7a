"""Finds the files of an adapter that is to be uploaded, and makes the messages of the upload."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from kestrel_client.errors import InvalidRequest, invalid_argument
from kestrel_client.v1 import engine_service_pb2
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub

CHUNK_BYTES = 2**20
LEAST_BYTES_PER_S = 64 * 2**10
"""A server ends uploads that are slower than this in the end."""
_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class AdapterUpload:
    """An adapter whose files are open."""

    header: engine_service_pb2.AdapterHeader
    weights: BinaryIO

    def parts(self) -> Iterator[engine_service_pb2.UploadAdapterRequest]:
        """Yields the messages of the upload. Ends when the file is closed, which it is after an early refusal."""
        yield engine_service_pb2.UploadAdapterRequest(header=self.header)
        with suppress(ValueError):
            while data := self.weights.read(CHUNK_BYTES):
                yield engine_service_pb2.UploadAdapterRequest(chunk=data)


class Sending:
    """Sends an upload over a channel of its own, in threads of gRPC. Closes both at the end.

    Calls of asyncio lose the status of a server that refuses an upload before all of it is sent.
    """

    def __init__(self, channel: grpc.Channel, upload: AdapterUpload, **options: Any) -> None:
        """Starts the call. `options` are those of calls of gRPC."""
        self._channel = channel
        self._upload = upload
        self._call: Any = EngineServiceStub(channel).UploadAdapter.future(upload.parts(), **options)

    def result(self) -> engine_service_pb2.UploadAdapterResponse:
        """Waits for the response. Raises `grpc.RpcError`."""
        try:
            return self._call.result()
        finally:
            self._channel.close()
            self._upload.weights.close()

    def cancel(self) -> None:
        """Cancels the call, whose `result` then ends."""
        self._call.cancel()


def opened(name: str, path: str | os.PathLike[str], replace: bool) -> AdapterUpload:
    """Returns the upload of the adapter in a folder, or of a file of weights, which the caller closes.

    The file `adapter_config.json` is read from the folder, or next to `adapter_model.safetensors`. Raises
    `InvalidRequest`, and `OSError` for files that cannot be read.
    """
    weights, config = _files_at(Path(path))
    with ExitStack() as stack:
        file = stack.enter_context(weights.open("rb"))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        header = engine_service_pb2.AdapterHeader(
            name=name, size_bytes=file.tell(), sha256=digest, config=config, replace=replace
        )
        file.seek(0)
        stack.pop_all()
        return AdapterUpload(header, file)


def _files_at(path: Path) -> tuple[Path, bytes | None]:
    """Returns the file of weights and the content of the configuration."""
    weights = _weights_in(path) if path.is_dir() else path
    if weights.suffix != ".safetensors":
        raise _invalid(
            f"{path} is no .safetensors file; pickled files are not taken, since reading them can run code"
        )
    config = weights.with_name(_CONFIG_FILE)
    if not config.is_file() or not (path.is_dir() or weights.name == _WEIGHTS_FILE):
        return weights, None
    with config.open("rb") as file:
        data = file.read(_MAX_CONFIG_BYTES + 1)
    if len(data) > _MAX_CONFIG_BYTES:
        raise _invalid(f"{config} has more than {_MAX_CONFIG_BYTES} bytes")
    return weights, data


def _weights_in(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if folder / _WEIGHTS_FILE in found:
        return folder / _WEIGHTS_FILE
    if len(found) != 1:
        raise _invalid(f"{folder} has {len(found) or 'no'} .safetensors files and no {_WEIGHTS_FILE}")
    return found[0]


def _invalid(description: str) -> InvalidRequest:
    return invalid_argument("path", description)
