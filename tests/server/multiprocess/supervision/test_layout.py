"""Which processes the options ask for."""

import subprocess
import sys

import pytest
import torch

from kestrel_grpc.config.options import ConfigurationError, ServerConfig
from kestrel_grpc.multiprocess.supervision import layout as layout_module
from kestrel_grpc.multiprocess.supervision.layout import CorePlace, Layout, layout_of, placed


def layout(environment: dict[str, str] | None = None, **flags: str) -> Layout:
    return layout_of(ServerConfig.parse(flags, {}), environment or {})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The machine as the module sees it: processors and GPUs."""
    found = {"processors": 16, "gpus": 2}
    monkeypatch.setattr(layout_module, "available_processors", lambda: found["processors"])
    monkeypatch.setattr(layout_module, "_num_gpus", lambda: found["gpus"])
    return found


def test_without_options_a_gpu_has_front_ends_and_a_host_without_one_has_one_process(
    machine: dict[str, int],
) -> None:
    assert layout() == Layout(4, (CorePlace("auto"),))
    assert layout(device="cpu") == Layout(0, (CorePlace("cpu"),))
    machine["gpus"] = 0
    assert layout() == Layout(0, (CorePlace("auto"),))


def test_each_gpu_has_a_core_that_sees_it_alone() -> None:
    assert layout(devices="1,0", frontends="4") == Layout(
        4, (CorePlace("cuda", {"CUDA_VISIBLE_DEVICES": "1"}), CorePlace("cuda", {"CUDA_VISIBLE_DEVICES": "0"}))
    )
    places = layout(devices="all").cores
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "1"]


def test_numbers_of_gpus_count_those_that_are_visible() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}
    assert layout(visible, devices="1").cores == (CorePlace("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-bb"}),)
    with pytest.raises(ConfigurationError, match=r"there is no GPU 2 in CUDA_VISIBLE_DEVICES=GPU-aa, GPU-bb"):
        layout(visible, devices="2")


def test_all_gpus_of_a_machine_without_one_are_refused(machine: dict[str, int]) -> None:
    machine["gpus"] = 0
    with pytest.raises(ConfigurationError, match="--devices all: torch finds no GPU"):
        layout(devices="all")


def test_several_devices_have_one_front_end_unless_more_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert layout(devices="cpu,cpu", frontends="2").num_frontends == 2
    assert caplog.messages == []
    assert layout(devices="cpu,cpu", frontends="0").num_frontends == 1
    assert caplog.messages == ["several devices need a front end of their own: there is one process for calls"]


def test_engines_on_processors_divide_them() -> None:
    assert layout(devices="cpu,cpu") == Layout(1, (CorePlace("cpu", {"OMP_NUM_THREADS": "8"}),) * 2)
    given = layout({"OMP_NUM_THREADS": "3"}, devices="cpu,cpu")
    assert [place.environment["OMP_NUM_THREADS"] for place in given.cores] == ["3", "3"]
    assert layout(devices="cpu") == Layout(0, (CorePlace("cpu"),))


@pytest.mark.parametrize(
    ("processors", "gpus", "flags", "expected"),
    [
        (16, 1, {}, 4),
        (8, 1, {}, 2),
        (7, 1, {}, 0),
        (64, 1, {}, 4),
        (64, 0, {}, 0),
        (64, 1, {"device": "cpu"}, 0),
        (64, 1, {"devices": "cpu,cpu"}, 1),
        (4, 2, {"devices": "0,1"}, 1),
        (64, 1, {"unix_socket": "/run/kestrel"}, 1),
    ],
)
def test_auto_gives_a_gpu_the_front_ends_that_its_processors_feed(
    processors: int, gpus: int, flags: dict[str, str], expected: int, machine: dict[str, int]
) -> None:
    machine.update(processors=processors, gpus=gpus)
    config = ServerConfig.parse({"frontends": "auto", **flags}, {})
    assert layout_of(config, {}).num_frontends == expected


def test_a_place_is_where_the_engine_runs() -> None:
    config = ServerConfig.parse({"devices": "0,1"}, {})
    assert placed(config, layout(devices="0,1").cores[1]).engine.device == "cuda"


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    counted = (
        "from kestrel_grpc.multiprocess.supervision.layout import _num_gpus; import sys; "
        "print(_num_gpus(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", counted], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(torch.cuda.device_count()), "False"]
