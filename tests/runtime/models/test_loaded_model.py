"""Facts about the device of an engine."""

from types import SimpleNamespace

import pytest
import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.loaded_model import pci_address


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch says of the first GPU that it sees."""
    properties = SimpleNamespace(pci_domain_id=0x10000, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_the_address_of_a_gpu_is_written_as_linux_writes_it(device: str, gpu: SimpleNamespace):
    assert pci_address(EngineConfig(model="", device=device)) == "10000:1b:00.0"
    gpu.pci_domain_id = 0
    assert pci_address(EngineConfig(model="", device=device)) == "0000:1b:00.0"


def test_an_engine_on_the_host_has_no_address_on_the_bus(gpu: SimpleNamespace):
    assert pci_address(EngineConfig(model="", device="cpu")) is None


def test_without_a_gpu_or_where_torch_does_not_tell_there_is_no_address(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    del gpu.pci_domain_id
    assert pci_address(EngineConfig(model="", device="cuda")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pci_address(EngineConfig(model="", device="cuda")) is None
