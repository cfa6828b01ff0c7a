"""A process on a host with several NUMA nodes runs near its GPU."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_runtime.memory.processor_affinity import bind_near, cpulist, near_processors, processors_in

GPU = "0000:1b:00.0"


@pytest.fixture
def pci_devices(tmp_path: Path) -> Path:
    """Two sockets of 8 processors with two threads each; the GPU is at the first one."""
    for address, local in ((GPU, "0-7,16-23\n"), ("0000:9a:00.0", "8-15,24-31\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(local)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0\n", {0}),
        ("0-3,8-11\n", {0, 1, 2, 3, 8, 9, 10, 11}),
        ("5,7,9-10", {5, 7, 9, 10}),
        ("\n", set()),
        ("", set()),
        ("-1", set()),
        ("0-", set()),
        ("0-3:1/2", set()),
        ("ffff,ffffffff", set()),
    ],
)
def test_a_list_of_processors_is_read_as_the_kernel_writes_it(text: str, expected: set[int]):
    assert processors_in(text) == expected
    assert processors_in(cpulist(expected)) == expected


def test_a_list_of_processors_is_written_with_ranges():
    assert cpulist({3, 1, 2, 8, 10, 11}) == "1-3,8,10-11"


def test_a_gpu_of_one_socket_has_the_processors_of_that_socket(pci_devices: Path):
    first = {*range(8), *range(16, 24)}
    assert near_processors(GPU, range(32), pci_devices) == first
    assert near_processors("0000:9a:00.0", range(32), pci_devices) == set(range(32)) - first


def test_a_container_binds_within_the_processors_that_it_may_use(pci_devices: Path):
    assert near_processors(GPU, {4, 5, 6, 7, 8, 9, 10, 11}, pci_devices) == {4, 5, 6, 7}


@pytest.mark.parametrize(
    "allowed",
    [
        pytest.param({0, 1, 2, 16}, id="all are near"),
        pytest.param({8, 9, 10, 11}, id="none is near"),
        pytest.param({7, 8, 9, 10}, id="one is near, which is not enough for an engine"),
    ],
)
def test_processors_are_left_as_they_are_where_binding_would_not_help(allowed: set[int], pci_devices: Path):
    assert near_processors(GPU, allowed, pci_devices) is None


def test_processors_are_left_as_they_are_where_sysfs_says_nothing(pci_devices: Path):
    assert near_processors("0000:ff:00.0", range(32), pci_devices) is None
    assert near_processors(GPU, range(32), pci_devices / "missing") is None
    (pci_devices / GPU / "local_cpulist").write_text("\n")
    assert near_processors(GPU, range(32), pci_devices) is None


def test_a_host_with_one_node_lists_all_its_processors_for_each_device(pci_devices: Path):
    (pci_devices / GPU / "local_cpulist").write_text("0-31\n")
    assert near_processors(GPU, range(32), pci_devices) is None


def test_every_thread_is_bound_and_the_log_says_where(
    pci_devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    bound: dict[int, frozenset[int]] = {}

    def bind(thread: int, processors: frozenset[int]) -> None:
        if thread == 12:
            raise ProcessLookupError
        bound[thread] = processors

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4, 12)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", bind, raising=False)
    threads = tmp_path / "task"
    for thread in (11, 12, 13):
        (threads / str(thread)).mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        bind_near(GPU, pci_devices=pci_devices, threads=threads)
    assert bound == {11: {4, 5, 6, 7}, 13: {4, 5, 6, 7}}
    assert caplog.messages == [f"bound to the 4 processors near the GPU at {GPU}: 4-7"]


def test_nothing_happens_without_a_gpu_or_without_a_better_place(
    pci_devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"), raising=False)
    with caplog.at_level(logging.INFO):
        bind_near(None, pci_devices=pci_devices)
        bind_near(GPU, pci_devices=pci_devices)
    assert caplog.messages == []


_BIND = """
import os, sys, threading
from pathlib import Path
from kestrel_runtime.memory import processor_affinity

processor_affinity._MIN_PROCESSORS = 1  # machines of tests may have two
running, ends = threading.Semaphore(0), threading.Event()
threads = [threading.Thread(target=lambda: (running.release(), ends.wait())) for _ in range(2)]
for thread in threads:
    thread.start()
    running.acquire()
processor_affinity.bind_near("gpu", pci_devices=Path(sys.argv[1]))
threads.append(threading.Thread(target=ends.wait))
threads[-1].start()
print(*(sorted(os.sched_getaffinity(thread.native_id)) for thread in (threading.main_thread(), *threads)))
ends.set()
"""


def test_threads_that_exist_and_those_that_come_are_bound_for_real(tmp_path: Path):
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this process may use one processor only")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "local_cpulist").write_text(f"{max(allowed)}\n")
    done = subprocess.run((sys.executable, "-c", _BIND, tmp_path), capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (" ".join([str([max(allowed)])] * 4), "")
