"""grpclib with stubs of its own generator: an answer, a stream, boxes, statuses, a cancellation."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from facts import FACTS, PICTURE, QUESTION, TOKEN
from google.rpc import error_details_pb2  # noqa: F401 - grpclib decodes details of imported messages only
from grpclib.client import Channel  # installed in an environment of its own
from grpclib.const import Status
from grpclib.exceptions import GRPCError

METADATA = {"authorization": f"Bearer {TOKEN}"}


def generate(folder: str) -> None:
    """Writes the messages and the stubs of the contract."""
    files = sorted(Path(FACTS["proto"]).glob("kestrel/v1/*.proto"))
    plugin = Path(sys.executable).with_name("protoc-gen-grpclib_python")
    protoc = (FACTS["python"], "-m", "grpc_tools.protoc", f"--plugin=protoc-gen-grpclib_python={plugin}")
    paths = (f"--proto_path={FACTS['proto']}", f"--proto_path={FACTS['google']}")
    outputs = (f"--python_out={folder}", f"--grpclib_python_out={folder}")
    subprocess.run((*protoc, *paths, *outputs, *map(str, files)), check=True)


async def check(folder: str) -> None:
    sys.path.insert(0, folder)
    stubs = importlib.import_module("kestrel.v1.vision_service_grpc")
    messages: Any = importlib.import_module("kestrel.v1.vision_service_pb2")
    media: Any = importlib.import_module("kestrel.v1.media_pb2")
    host, port = FACTS["grpc"].rsplit(":", 1)
    async with Channel(host, int(port)) as channel:
        vision = stubs.VisionServiceStub(channel)
        image = media.Image(data=PICTURE)
        fields: Any = {"question": QUESTION, "image": image, "sampling": {"temperature": 0}}
        whole = (
            await vision.CompleteQuery(messages.CompleteQueryRequest(**fields), metadata=METADATA)
        ).result.answer
        assert "star" in whole, whole
        print("a whole answer")

        text = ""
        async with vision.Query.open(metadata=METADATA) as stream:
            await stream.send_message(messages.QueryRequest(**fields), end=True)
            async for message in stream:
                text += message.delta.text
        assert text == whole, (text, whole)
        print("a stream")

        found = await vision.Detect(messages.DetectRequest(object="star", image=image), metadata=METADATA)
        assert all(0 <= item.box.x_min <= item.box.x_max <= 1 for item in found.objects)
        print("boxes")

        wrong = messages.DetectRequest(object="star", image=image)
        wrong.options.model = "gull"
        error = await error_of(vision.Detect(wrong, metadata=METADATA))
        assert error.status == Status.NOT_FOUND, error
        assert [item.reason for item in error.details or () if hasattr(item, "reason")] == ["MODEL_NOT_FOUND"]
        error = await error_of(vision.Detect(wrong))
        assert error.status == Status.UNAUTHENTICATED, error
        print("statuses with details")

        long = messages.QueryRequest(question="?")
        long.constraint.regex = "[a-z ]{900}"
        async with vision.Query.open(metadata=METADATA) as stream:
            await stream.send_message(long, end=True)
            await stream.recv_message()
            await stream.cancel()
        print("a cancellation")


async def error_of(call: Any) -> GRPCError:
    try:
        await call
    except GRPCError as error:
        return error
    raise AssertionError("it did not fail")


with tempfile.TemporaryDirectory() as generated:
    generate(generated)
    asyncio.run(check(generated))
