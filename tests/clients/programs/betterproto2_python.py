"""betterproto2 with stubs of its own generator: an answer, a stream, boxes, a status."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from facts import FACTS, PICTURE, QUESTION, TOKEN
from grpclib.client import Channel  # installed in an environment of its own
from grpclib.const import Status
from grpclib.exceptions import GRPCError

METADATA = {"authorization": f"Bearer {TOKEN}"}


def generate(folder: Path) -> None:
    """Writes the messages and the stubs of the contract. They have to be in a package."""
    folder.mkdir()
    files = sorted(Path(FACTS["proto"]).glob("kestrel/v1/*.proto"))
    plugin = Path(sys.executable).with_name("protoc-gen-python_betterproto2")
    protoc = (FACTS["python"], "-m", "grpc_tools.protoc", f"--plugin=protoc-gen-python_betterproto2={plugin}")
    paths = (f"--proto_path={FACTS['proto']}", f"--proto_path={FACTS['google']}")
    options = (f"--python_betterproto2_out={folder}", "--python_betterproto2_opt=client_generation=async")
    # The generator runs a formatter of its environment.
    path = f"{plugin.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run((*protoc, *paths, *options, *map(str, files)), check=True, env={**os.environ, "PATH": path})


async def check(folder: str) -> None:
    sys.path.insert(0, folder)
    v1: Any = importlib.import_module("stubs.kestrel.v1")
    host, port = FACTS["grpc"].rsplit(":", 1)
    async with Channel(host, int(port)) as channel:
        vision = v1.VisionServiceStub(channel, metadata=METADATA)
        image = v1.Image(data=PICTURE)
        fields: Any = {"question": QUESTION, "image": image, "sampling": v1.SamplingParams(temperature=0)}
        whole = (await vision.complete_query(v1.CompleteQueryRequest(**fields))).result.answer
        assert "star" in whole, whole
        print("a whole answer")

        text = ""
        async for message in vision.query(v1.QueryRequest(**fields)):
            text += message.delta.text if message.delta else ""
        assert text == whole, (text, whole)
        print("a stream")

        found = await vision.detect(v1.DetectRequest(object="star", image=image))
        assert all(0 <= item.box.x_min <= item.box.x_max <= 1 for item in found.objects)
        print("boxes")

        try:
            await vision.detect(
                v1.DetectRequest(object="star", options=v1.RequestOptions(model="gull"), image=image)
            )
        except GRPCError as error:
            status = error.status
        else:
            status = Status.OK
        assert status == Status.NOT_FOUND, status
        print("statuses")


with tempfile.TemporaryDirectory() as generated:
    generate(Path(generated) / "stubs")
    asyncio.run(check(generated))
