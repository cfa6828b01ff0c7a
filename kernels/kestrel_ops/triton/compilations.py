"""Compiles kernels before they are needed, many at once, and counts what is compiled in this process.

Where kernels are launched, `launcher(kernel, grid)` stands for `kernel[grid]`. Within `compiled_together` it has
the kernel compiled for its arguments and does not run it, so that steps that run for this compute nothing.
Processes forked from this one compile into the folder of compiled kernels, from which this process loads them.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton
from triton import knobs

_MOST_PROCESSES = 16
"""Each takes some hundred megabytes of memory."""
_MOST_SECONDS = 120.0
_only_compiles: ContextVar[bool] = ContextVar("_only_compiles", default=False)


def prepare() -> None:
    """Have Triton hash its own files, which takes half a second, before the first kernel is needed."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def launcher(kernel: Any, grid: tuple[Any, ...]) -> Callable[..., Any]:
    """Launches a kernel with arguments, or within `compiled_together` has it compiled for them."""
    return partial(kernel.warmup, grid=grid) if _only_compiles.get() else kernel[grid]


@contextmanager
def compiled_together(num_processors: int) -> Iterator[None]:
    """Within it kernels are compiled instead of launched; they are ready at its end.

    With a Triton that cannot compile in the background, before 3.5, they are launched.
    """
    if not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    compiling = _Compiling(min(num_processors, _MOST_PROCESSES))
    with triton.AsyncCompileMode(compiling):  # pyright: ignore[reportAttributeAccessIssue]
        token = _only_compiles.set(True)
        try:
            yield
        finally:
            _only_compiles.reset(token)
            compiling.finish()
    for kernel in compiling.kernels:
        _ = kernel.run  # loads it onto the device


class _Compiling(Executor):
    """Takes compilations, and does them all in `finish`."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._jobs: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.kernels: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((partial(fn, *args, **kwargs), future))
        return future

    def finish(self) -> None:
        """Compile in other processes what is not in the folder of compiled kernels, and load all from there."""
        in_other_processes([job for job, _ in self._jobs], self._num_processes)
        for job, future in self._jobs:
            try:
                kernel = job()
            except Exception as error:
                future.set_exception(error)
            else:
                self.kernels.append(kernel)
                future.set_result(kernel)


def in_other_processes(jobs: list[Callable[[], Any]], num_processes: int) -> None:
    """Compile kernels for what this leaves in files. What fails there, or takes too long, is left to the caller.

    Forked processes know the jobs, which cannot be sent to others. They use no device.
    """
    num_processes = min(num_processes, len(jobs))
    if num_processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return
    context = multiprocessing.get_context("fork")
    numbers: Any = context.SimpleQueue()
    for number in (*range(len(jobs)), *[None] * num_processes):
        numbers.put(number)

    def work() -> None:
        while (number := numbers.get()) is not None:
            with suppress(Exception):
                kernel = jobs[number]()
                # A C function that launches kernels with such arguments, which is compiled, too.
                triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)

    processes = [context.Process(target=work, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    until = time.monotonic() + _MOST_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()  # without effect where it has ended


class Compilations:
    """Counts what is compiled, or loaded from the folder of compiled kernels, from its construction on."""

    def __init__(self) -> None:
        self._next_number = itertools.count(1)
        self.count = 0
        self._hook_before: Any = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *arguments: Any, **facts: Any) -> Any:
        self.count = next(self._next_number)
        return None if self._hook_before is None else self._hook_before(*arguments, **facts)


@functools.cache
def compilations() -> Compilations:
    """Those of this process, in all threads."""
    return Compilations()
