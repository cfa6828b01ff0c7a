"""Launches that only compile, and what other processes do for them; without a device."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from kestrel_ops.compilation import triton_compilations as compilations_module
from kestrel_ops.compilation.triton_compilations import (
    OtherProcesses,
    QuickLauncher,
    compilations,
    compiled_together,
    found_listed,
    launcher,
    load_listed,
    take_over,
)
from kestrel_ops.device_limits import DeviceLimits

HOPPER = DeviceLimits.of_card((9, 0))


class Kernel:
    """Notes what is asked of it."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("launched", grid, arguments))

    def warmup(self, *arguments, grid):
        self.calls.append(("compiled", grid, arguments))


def test_kernels_are_compiled_instead_of_launched_within_the_block_alone(tmp_path):
    kernel = Kernel()
    with compiled_together(1, HOPPER, compiled_ahead=tmp_path):
        launcher(kernel, (2,))(7)
    launcher(kernel, (2,))(7)
    assert kernel.calls == [("compiled", (2,), (7,)), ("launched", (2,), (7,))]


def test_a_failure_within_the_block_leaves_launches_as_they_were(tmp_path):
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), compiled_together(1, HOPPER, compiled_ahead=tmp_path):
        raise ZeroDivisionError
    launcher(kernel, (1,))()
    assert kernel.calls == [("launched", (1,), ())]


class TritonsKernel:
    """Returns what it is compiled to from a launch, as Triton's kernels do, and notes what is launched."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **constants):
            self.calls.append(("found", grid, arguments, constants, num_warps))
            return CompiledKernel(self.calls)

        return launch


class CompiledKernel:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("launched", grid, arguments))


def test_a_kernel_is_found_once_for_each_of_the_values_of_its_constants():
    kernel = TritonsKernel()
    launch, rows = QuickLauncher(kernel), torch.zeros(3)
    for block, grid in ((16, (1, 1, 1)), (16, (2, 1, 1)), (32, (1, 1, 1)), (32, (1, 2, 1))):
        launch(grid, rows, 7, block=block, is_even=True, num_warps=4)
    assert kernel.calls == [
        ("found", (1, 1, 1), (rows, 7), {"block": 16, "is_even": True}, 4),
        ("launched", (2, 1, 1), (rows, 7, 16, True)),
        ("found", (1, 1, 1), (rows, 7), {"block": 32, "is_even": True}, 4),
        ("launched", (1, 2, 1), (rows, 7, 32, True)),
    ]


@triton.jit
def _twice(values, out, block: tl.constexpr):
    places = tl.arange(0, block)
    tl.store(out + places, tl.load(values + places) * 2)


def compile_twice(folder):
    """In a process of its own, since Triton's interpreter compiles nothing."""

    def compile_it(meanwhile=None):
        with compiled_together(2, HOPPER, compiled_ahead=folder, kept_in=folder, meanwhile=meanwhile) as kernels:
            values = torch.empty(64, device="meta")
            launcher(_twice, (1,))(values, values[1:], block=16)
            assert kernels == []
        return list(kernels)

    first = compile_it()
    ((module, name, arguments),) = first
    assert (module, name) == (__name__, "_twice")
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert any(path.suffix == ".cubin" for path in kept)
    assert not any(path.suffix == ".ptx" for path in kept)
    _twice.device_caches.clear()
    assert compile_it() == first
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.cubin")}.items() <= kept.items()
    _twice.device_caches.clear()
    with pytest.raises(ZeroDivisionError):
        compile_it(lambda: 1 // 0)
    with compilations_module._as_if_here(HOPPER, folder):
        _twice.device_caches.clear()
        (kernel,) = found_listed(json.loads(json.dumps(first)))
        assert kernel.metadata.target.arch == 90
        other = json.loads(arguments)
        other["constant_vals"] = [32]
        with pytest.raises(compilations_module._NotKept):
            found_listed([(module, name, json.dumps(other))])
    assert load_listed([("nowhere", name, arguments)]) is None


@pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="this Triton compiles within a launch")
def test_a_kernel_is_compiled_for_a_card_that_is_not_here_once(tmp_path, warm_starts):
    script = (
        "import os; os.environ.pop('TRITON_INTERPRET', None); from pathlib import Path; "
        f"from {__name__} import compile_twice; compile_twice(Path({str(tmp_path)!r}))"
    )
    own = {name: value for name, value in os.environ.items() if name != "TRITON_DEFAULT_FP_FUSION"}
    command, root = [sys.executable, "-W", "always", "-c", script], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=own, check=True, capture_output=True, text=True)
    assert "FP_FUSION" not in done.stderr, "Triton leaves no choice to a later version"


def test_what_was_compiled_ahead_is_taken_over_and_what_is_there_stays(tmp_path):
    ahead, own = tmp_path / "ahead", tmp_path / "own"
    for folder, name, text in ((ahead, "A", "1"), (ahead, "B", "2"), (own, "B", "mine")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "kernel.cubin").write_text(text)
        paths = {"kernel.cubin": str(folder / name / "kernel.cubin")}
        (folder / name / "__grp__kernel.json").write_text(json.dumps({"child_paths": paths}))
    take_over(ahead, own)
    take_over(tmp_path / "nowhere", own)
    assert {path.parent.name: path.read_text() for path in own.rglob("*.cubin")} == {"A": "1", "B": "mine"}
    assert {path.name for path in own.iterdir()} == {"A", "B"}
    listing = json.loads((own / "A" / "__grp__kernel.json").read_text())
    assert listing == {"child_paths": {"kernel.cubin": str(own / "A" / "kernel.cubin")}}


def test_jobs_run_in_other_processes_and_one_that_fails_stops_no_other(tmp_path):
    def job(number):
        (tmp_path / str(number)).write_text(str(os.getpid()))
        if number == 1:
            raise RuntimeError("does not compile")

    processes = OtherProcesses(2)
    for number in range(5):
        processes.start(partial(job, number))
    processes.join(None)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found.keys() == set("01234")
    assert str(os.getpid()) not in found.values()


def test_one_process_alone_is_left_the_work(tmp_path):
    processes = OtherProcesses(1)
    processes.start((tmp_path / "done").touch)
    processes.join(None)
    assert not list(tmp_path.iterdir())


def test_processes_start_once_no_thread_has_tensors_on_a_device(tmp_path):
    may_fork = threading.Event()
    processes = OtherProcesses(2, may_fork)
    for name in "ab":
        processes.start((tmp_path / name).touch)
    assert not multiprocessing.active_children()
    may_fork.set()
    processes.start((tmp_path / "c").touch)
    processes.join(None)
    assert {file.name for file in tmp_path.iterdir()} == set("abc")


def test_who_waits_for_the_processes_waits_until_they_may_start(tmp_path):
    may_fork = threading.Event()
    processes = OtherProcesses(2, may_fork)
    processes.start((tmp_path / "done").touch)
    later = threading.Timer(0.05, may_fork.set)
    later.start()
    processes.join(None)
    later.join()
    assert [file.name for file in tmp_path.iterdir()] == ["done"]


def test_what_may_not_be_forked_in_time_is_left_to_the_caller(tmp_path):
    processes = OtherProcesses(2, threading.Event())
    processes.start((tmp_path / "done").touch)
    processes.join(0.01)
    assert not list(tmp_path.iterdir())


def test_a_process_has_one_count_of_its_compilations():
    counted = compilations()
    before = counted.count
    counted._note(fn=None)
    assert counted.count == before + 1
    assert compilations() is counted


def test_the_processes_also_compile_what_is_not_tritons(tmp_path):
    def job(name):
        (tmp_path / name).write_text(str(os.getpid()))

    with compiled_together(2, HOPPER, compiled_ahead=tmp_path, others=[lambda: job("a"), lambda: job("b")]):
        pass
    assert str(os.getpid()) not in {(tmp_path / name).read_text() for name in "ab"}


def test_what_is_done_meanwhile_begins_once_no_thread_has_tensors_on_a_device(tmp_path):
    may_fork, seen = threading.Event(), list[bool]()
    later = threading.Timer(0.05, may_fork.set)
    later.start()
    with compiled_together(
        1, HOPPER, compiled_ahead=tmp_path, may_fork=may_fork, meanwhile=lambda: seen.append(may_fork.is_set())
    ):
        assert seen == []
    later.join()
    assert seen == [True]


@pytest.mark.skipif(triton.__version__.startswith("3.6"), reason="this Triton imports torch")
def test_triton_hashes_its_files_without_torch():
    file = importlib.import_module("kestrel_ops.compilation.triton_key").__file__
    script = (
        f"import runpy, sys; runpy.run_path({file!r}, run_name='__main__'); "
        "print('triton.runtime.cache' in sys.modules, 'torch' in sys.modules)"
    )
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=own)
    assert done.stdout.split() == ["True", "False"]


def test_equal_functions_that_launch_kernels_are_compiled_once(tmp_path):
    def kernel(kind):
        return SimpleNamespace(src=SimpleNamespace(signature={"x": kind}), metadata=None)

    def compiled(source, metadata):
        (tmp_path / f"{source.signature['x']}-{os.getpid()}").touch()

    drivers: Any = triton.runtime.driver
    drivers.set_active(SimpleNamespace(launcher_cls=compiled))
    try:
        processes = OtherProcesses(3)
        for kind in ("*bf16", "*bf16", "i32"):
            processes.start(partial(kernel, kind))
        processes.join(None)
    finally:
        drivers.set_active(None)
    assert sorted(file.name.partition("-")[0] for file in tmp_path.iterdir()) == ["*bf16", "i32"]
