"""The committed stubs are what the contract generates."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

from kestrel_client.v1 import engine_service_pb2, generation_pb2, image_service_pb2, media_pb2, vision_service_pb2
from kestrel_grpc.frontends.grpc.orca import orca_load_report_pb2
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2

ROOT = Path(__file__).parents[2]
COMMITTED = (
    ROOT / "clients/python/kestrel_client/v1",
    ROOT / "kestrel_grpc/frontends/triton/v2",
    ROOT / "kestrel_grpc/frontends/grpc/orca",
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folders = [tmp_path_factory.mktemp(folder.name) for folder in COMMITTED]
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run(["sh", ROOT / "proto/generate.sh", *folders], check=True, env=environment)
    return {path.name: path.read_bytes() for folder in folders for path in folder.iterdir()}


def test_committed_stubs_equal_generated_ones_byte_for_byte(generated: dict[str, bytes]):
    committed = {path.name: path.read_bytes() for folder in COMMITTED for path in folder.glob("*_pb2*")}
    assert committed.keys() == generated.keys()
    assert committed == generated


def test_stubs_run_on_the_oldest_libraries_that_the_client_allows(generated: dict[str, bytes]):
    project = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text())["project"]
    assert "grpcio>=1.76,<2" in project["dependencies"]
    assert "protobuf>=6.31.1,<8" in project["dependencies"]
    assert b"GRPC_GENERATED_VERSION = '1.76.0'" in generated["vision_service_pb2_grpc.py"]
    assert b"Protobuf Python Version: 6.31.1" in generated["vision_service_pb2.py"]


def test_descriptors_keep_the_name_of_the_contract():
    for module in (media_pb2, generation_pb2, vision_service_pb2, image_service_pb2, engine_service_pb2):
        assert module.DESCRIPTOR.package == "kestrel.v1"
        assert module.DESCRIPTOR.name.startswith("kestrel/v1/")


def test_contracts_of_others_have_a_pool_of_their_own():
    for module, package in ((grpc_service_pb2, "inference"), (orca_load_report_pb2, "xds.data.orca.v3")):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindFileByName(module.DESCRIPTOR.name)
        assert module.DESCRIPTOR.package == package
