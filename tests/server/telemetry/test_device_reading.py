"""Readings of a GPU, from a library that stands for the driver's."""

# ruff: noqa: N802 (methods bear the names of the driver's functions)
import sys
from types import SimpleNamespace

import pytest

from kestrel_grpc.telemetry.device_reading import DeviceReading, device_reader


class NVMLError(Exception):
    pass


class Library:
    """Has one device of the UUID "abc"; every call fails where `fails` is set."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.fails = False

    def nvmlInit(self) -> None:
        self._call()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-abc":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._call()
        return SimpleNamespace(used=3 << 30, total=4 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._call()
        return SimpleNamespace(gpu=75)

    def _call(self) -> None:
        if self.fails:
            raise NVMLError("GPU is lost")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_a_reading_has_the_memory_and_the_use_of_the_device(library):
    assert device_reader("abc")() == DeviceReading(3 << 30, 4 << 30, 0.75)


def test_a_device_that_fails_later_is_read_as_none(library):
    read = device_reader("abc")
    library.fails = True
    assert read() is None
    library.fails = False
    assert read() is not None


def test_without_a_gpu_nothing_is_read(library):
    assert device_reader(None)() is None


@pytest.mark.parametrize("uuid", ["abc", "other"])
def test_a_driver_or_device_that_is_not_there_is_a_warning(library, caplog, uuid):
    library.fails = uuid == "abc"
    assert device_reader(uuid)() is None
    (line,) = caplog.messages
    assert line.startswith("memory and use of the GPU are not in the metrics: ")


def test_without_the_library_nothing_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_reader("abc")() is None
