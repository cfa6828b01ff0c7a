"""The configuration files for ghz: settings that ghz has, and data that are requests of this server."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from PIL import Image

from kestrel_client.v1 import vision_service_pb2
from tests.reference_fixtures import CHECKOUT
from tests.server.serving import serving

FILES = sorted((CHECKOUT / "deploy" / "ghz").glob("*.json"))
# The long names of the options in ghz's documentation, https://ghz.sh/docs/options, which are the names of settings
# in a configuration file (https://ghz.sh/docs/example_config); `host` is the argument of the command.
_NAMES = """
host proto protoset call import-paths cacert cert key cname skipTLS insecure authority async rps
load-schedule load-start load-step load-end load-max-duration concurrency concurrency-schedule
concurrency-start concurrency-end concurrency-step concurrency-step-duration
concurrency-max-duration total timeout duration max-duration duration-stop data data-file binary
binary-file metadata metadata-file stream-interval stream-call-duration stream-call-count
stream-dynamic-messages reflect-metadata max-recv-message-size max-send-message-size output format
skipFirst connections connect-timeout keepalive name tags cpus debug enable-compression lb-strategy
count-errors disable-template-functions disable-template-data
"""
GHZ_SETTINGS = frozenset(_NAMES.split())
_DURATION = re.compile(r"\d+(\.\d+)?(ms|s|m|h)")


def settings(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def request(file: Path) -> tuple[str, Message]:
    """The name of the method, and the message that ghz makes of the data."""
    found = settings(file)
    service, _, method = found["call"].rpartition(".")
    descriptor = vision_service_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    assert descriptor.full_name == service
    kind = getattr(vision_service_pb2, descriptor.methods_by_name[method].input_type.name)
    return method, json_format.ParseDict(found["data"], kind())


def test_there_are_files():
    assert len(FILES) >= 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_setting_is_one_of_ghz(file: Path):
    found = settings(file)
    assert found.keys() - GHZ_SETTINGS == set()
    for name in ("timeout", "duration"):
        assert name not in found or _DURATION.fullmatch(found[name])
    assert (CHECKOUT / found["proto"]).is_file()
    assert all((CHECKOUT / path).is_dir() for path in found["import-paths"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_data_are_a_request_with_a_picture(file: Path):
    _, message = request(file)
    picture: Any = message
    assert Image.open(io.BytesIO(picture.image.data)).size == (160, 120)


async def test_the_server_answers_every_call():
    async with serving() as server:
        for file in FILES:
            method, message = request(file)
            call = getattr(server.vision, method)(message)
            answers = (
                [await call] if method in ("CompleteQuery", "Point", "Detect") else [item async for item in call]
            )
            assert answers
        assert len(server.engine.requests) == len(FILES)


def test_every_file_is_in_the_documentation():
    page = (CHECKOUT / "docs" / "bench.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+\.json)` \| `(VisionService\.\w+)`", page, re.MULTILINE))
    assert rows == {file.name: settings(file)["call"].removeprefix("kestrel.v1.") for file in FILES}
