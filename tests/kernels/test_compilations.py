"""Launches that only compile, and what other processes do for them; without a device."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

from kestrel_ops.triton.compilations import compilations, compiled_together, in_other_processes, launcher


class Kernel:
    """Notes what is asked of it."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("launched", grid, arguments))

    def warmup(self, *arguments, grid):
        self.calls.append(("compiled", grid, arguments))


def test_kernels_are_compiled_instead_of_launched_within_the_block_alone():
    kernel = Kernel()
    with compiled_together(1):
        launcher(kernel, (2,))(7)
    launcher(kernel, (2,))(7)
    assert kernel.calls == [("compiled", (2,), (7,)), ("launched", (2,), (7,))]


def test_a_failure_within_the_block_leaves_launches_as_they_were():
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), compiled_together(1):
        raise ZeroDivisionError
    launcher(kernel, (1,))()
    assert kernel.calls == [("launched", (1,), ())]


def test_jobs_run_in_other_processes_and_one_that_fails_stops_no_other(tmp_path):
    def job(number):
        (tmp_path / str(number)).write_text(str(os.getpid()))
        if number == 1:
            raise RuntimeError("does not compile")

    in_other_processes([lambda number=number: job(number) for number in range(5)], 2)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found.keys() == set("01234")
    assert str(os.getpid()) not in found.values()


def test_one_process_alone_is_left_the_work(tmp_path):
    in_other_processes([lambda: (tmp_path / "done").touch()] * 3, 1)
    assert not list(tmp_path.iterdir())


def test_a_process_has_one_count_of_its_compilations():
    counted = compilations()
    before = counted.count
    counted._note(fn=None)
    assert counted.count == before + 1
    assert compilations() is counted
