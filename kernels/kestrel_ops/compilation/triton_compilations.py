"""Compiles kernels before they are needed, many at once, and counts what is compiled in this process.

Where kernels are launched, `launcher(kernel, grid)` stands for `kernel[grid]`. Within `compiled_together` it has
the kernel compiled for its arguments and does not run it, so that steps that run for this, on tensors without
memory, compute nothing.
Processes forked from this one compile into the folder of compiled kernels, from which this process loads them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager, get_cache_manager

from kestrel_ops.device_limits import DeviceLimits, meta_stands_for

# Products and sums are fused, as kernels have been measured and verified. From version 3.10 on Triton fuses none by
# default, so that answers would differ, and 3.9 warns of that where nothing is said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_MOST_PROCESSES = 16
"""Each takes some hundred megabytes of memory."""
_MOST_SECONDS = 120.0
_only_compiles: ContextVar[bool] = ContextVar("_only_compiles", default=False)


def folder_of(identity: Iterable[object]) -> Any:
    """Returns Triton's cache manager for files that depend on the `repr` of these values, and on the version of
    Triton.

    None where its folder cannot be made.
    """
    own = (*identity, triton.__version__)
    try:
        return get_cache_manager(hashlib.sha256(repr(own).encode()).hexdigest())
    except OSError:
        return None


def only_compiles() -> bool:
    """Returns True while kernels are compiled instead of launched, so that tensors have no values."""
    return _only_compiles.get()


def launcher(kernel: Any, grid: tuple[Any, ...]) -> Callable[..., Any]:
    """Launches a kernel with arguments, or within `compiled_together` has it compiled for them."""
    return partial(_compile, kernel, grid) if _only_compiles.get() else kernel[grid]


class QuickLauncher:
    """Launches a kernel that is not part of a graph, and whose operands always have the same types and alignment.

    Triton looks at each operand and setting to find the compiled kernel, which takes several times as long as the
    launch. Here the values of the constants alone find it, after its first launch. Safe in any thread.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, int, int], *operands: Any, num_warps: int, **constants: Any) -> None:
        """Takes all operands and constants in the order of the kernel's parameters."""
        key = (torch.cuda.current_device() if operands[0].is_cuda else None, num_warps, *constants.values())
        compiled = None if _only_compiles.get() else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*operands, *constants.values())
            return
        compiled = launcher(self._kernel, grid)(*operands, **constants, num_warps=num_warps)
        if compiled is not None and not _only_compiles.get():  # the interpreter compiles nothing
            self._compiled[key] = compiled


@dataclass(frozen=True, slots=True)
class _Operand:
    """Describes a tensor to Triton's compiler, which needs its type and alignment."""

    dtype: torch.dtype
    offset_bytes: int

    def data_ptr(self) -> int:
        """Returns the offset: device memory begins at multiples of more than 16 bytes."""
        return self.offset_bytes


def _compile(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **named: Any) -> Any:
    operands = [
        _Operand(argument.dtype, argument.storage_offset() * argument.dtype.itemsize)
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    ]
    return kernel.warmup(*operands, grid=grid, **named)


ListedKernel = tuple[str, str, str]
"""Module and name of a kernel, and what Triton writes down of the arguments that it is compiled for."""


def load_listed(listed: Iterable[Sequence[str]]) -> int | None:
    """Loads kernels that `compiled_together` has listed from the folder of compiled kernels; returns their number.

    Returns None where one of them is not there, or is no longer such a kernel: compile all of them then.
    """
    try:
        kernels = found_listed(listed)
        for kernel in kernels:
            _ = kernel.run  # loads it onto the device
    except Exception:
        return None
    return len(kernels)


def found_listed(listed: Iterable[Sequence[str]]) -> list[Any]:
    """Kernels that `compiled_together` has listed, not on the device yet. Raises where one of them is not kept."""
    with _nothing_is_compiled(), knobs.compilation.scope():
        knobs.compilation.store_binary_only = True
        return [getattr(importlib.import_module(module), name).preload(data) for module, name, data in listed]


@contextmanager
def _listing(kernels: list[ListedKernel]) -> Iterator[None]:
    """Lists every kernel that is compiled or found within the block."""
    before: Any = knobs.runtime.jit_post_compile_hook

    def note(*arguments: Any, **facts: Any) -> Any:
        function = facts["fn"].jit_function
        kernels.append((function.fn.__module__, function.fn.__qualname__, facts["compile"]["specialization_data"]))
        return None if before is None else before(*arguments, **facts)

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before


@contextmanager
def compiled_together(
    num_processors: int,
    limits: DeviceLimits,
    *,
    compiled_ahead: Path,
    kept_in: Path | None = None,
    others: Sequence[Callable[[], object]] = (),
    may_fork: threading.Event | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Iterator[list[ListedKernel]]:
    """Compiles and lists kernels within the block, for a device with these limits, instead of launching them.

    What stands in the folder `compiled_ahead` is not compiled again.
    At its end they are loaded, or with `kept_in`, where the device need not be here, they are in this folder. A
    Triton that cannot compile in the background, before 3.5, compiles one after the other.
    """
    processes = OtherProcesses(min(num_processors, _MOST_PROCESSES), may_fork)
    if kept_in is None:
        take_over(compiled_ahead, Path(knobs.cache.dir))
        compiling = _Compiling(processes, _MOST_SECONDS, others)
    else:
        compiling = _Compiling(processes, None)
    together = getattr(triton, "AsyncCompileMode", lambda _: nullcontext())
    listed: list[ListedKernel] = []
    with nullcontext() if kept_in is None else _as_if_here(limits, kept_in):
        with _listing(listed), together(compiling), meta_stands_for(limits), knobs.compilation.scope():
            knobs.compilation.store_binary_only = True  # what only people read takes ten times as much
            token = _only_compiles.set(True)
            try:
                yield listed
            finally:
                _only_compiles.reset(token)
                compiling.finish(meanwhile)
        if kept_in is None:
            for kernel in compiling.kernels:
                _ = kernel.run  # loads it onto the device


def take_over(source: Path, target: Path) -> None:
    """Copies what was compiled ahead to where Triton looks for it, and leaves what is there.

    Triton names its folders by all that a result depends on: the kernel and what it calls, the arguments, the
    device, its own files. So those of other versions do no harm.
    """
    if not source.is_dir() or source == target:
        return
    target.mkdir(parents=True, exist_ok=True)
    known = {folder.name for folder in target.iterdir()}
    for folder in source.iterdir():
        if folder.name in known:
            continue
        with suppress(OSError), tempfile.TemporaryDirectory(dir=target) as aside:
            copy, own = Path(aside, folder.name), target / folder.name
            shutil.copytree(folder, copy)
            for listing in copy.glob("__grp__*"):  # of the folder's files, with their paths
                listing.write_text(json.dumps({"child_paths": {name: str(own / name) for name in _names(listing)}}))
            copy.rename(own)


def _names(listing: Path) -> Iterable[str]:
    return json.loads(listing.read_text())["child_paths"]


@contextmanager
def _as_if_here(limits: DeviceLimits, kept_in: Path) -> Iterator[None]:
    """Has Triton compile within the block for a device with these limits, without a driver, into a folder."""
    assert limits.capability is not None, "Triton compiles for CUDA devices"
    major, minor = limits.capability
    library = importlib.import_module("triton.backends.nvidia.driver")
    target = GPUTarget("cuda", 10 * major + minor, 32)
    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: target,
        launcher_cls=library.CudaLauncher,
    )
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = str(kept_in)
        if not _has_driver(library):  # what is linked to it finds the symbols where it runs
            compiler = os.environ.get("CC", "cc")
            stub = os.path.join(folder, "libcuda.so.1")
            subprocess.run([compiler, "-shared", "-x", "c", os.devnull, "-o", stub], check=True)
            library.libcuda_dirs.cache_clear()
            library.library_dirs.cache_clear()
            knobs.nvidia.libcuda_path = folder
        with suppress(Exception):  # compiled, and not loaded
            library.CudaUtils()
        drivers: Any = triton.runtime.driver
        drivers.set_active(stand_in)
        try:
            yield
        finally:
            drivers.set_active(None)  # its next use finds the driver of this machine


def _has_driver(library: Any) -> bool:
    try:
        return bool(library.libcuda_dirs())
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False


class _Compiling(Executor):
    """Has other processes compile what is submitted, from the submission on, and takes all of it in `finish`."""

    def __init__(
        self, processes: OtherProcesses, most_seconds: float | None, others: Sequence[Callable[[], object]] = ()
    ) -> None:
        self._processes = processes
        self._most_seconds = most_seconds
        self._jobs: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.kernels: list[Any] = []
        for other in others:
            self._processes.start(other)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job, future = partial(fn, *args, **kwargs), Future[Any]()
        self._jobs.append((job, future))
        if not _is_kept(job):
            self._processes.start(job)
        return future

    def finish(self, meanwhile: Callable[[], object] | None) -> None:
        """Waits for the other processes, and reads all kernels from the folder of compiled kernels.

        Calls `meanwhile` once no other thread uses the device.
        """
        try:
            self._processes.start_waiting(None)  # a load ends in any case, and may take longer than compilations
            if meanwhile is not None:
                meanwhile()
        finally:  # Triton waits for what was submitted, whatever has failed
            self._processes.join(self._most_seconds)
            self._take()

    def _take(self) -> None:
        for job, future in self._jobs:
            try:
                kernel = job()
            except Exception as error:
                future.set_exception(error)
            else:
                self.kernels.append(kernel)
                future.set_result(kernel)


class _NotKept(Exception):
    """Raised if a kernel is not in the folder of compiled kernels."""


@contextmanager
def _nothing_is_compiled() -> Iterator[None]:
    """Raises `_NotKept` within the block for each kernel that is not in the folder of compiled kernels."""
    manager: Any = knobs.cache.manager_class or FileCacheManager

    class KeptKernels(manager):
        """Finds the files of kernels, and refuses those that have none."""

        def get_group(self, filename: str) -> dict[str, str]:
            found = super().get_group(filename)
            if not found or filename not in found:
                raise _NotKept
            return found

    with knobs.cache.scope():
        knobs.cache.manager_class = KeptKernels
        yield


def _is_kept(job: Callable[[], Any]) -> bool:
    try:
        with _nothing_is_compiled():
            job()
    except _NotKept:
        return False
    return True


class OtherProcesses:
    """Compiles kernels for what this leaves in files. What fails there, or takes too long, is left to the caller.

    A forked process knows its job, which cannot be sent to another one. It uses no device.
    """

    def __init__(self, most_at_once: int, may_fork: threading.Event | None = None) -> None:
        """Takes the number of processes that compile at once; if it is one, the work is left to the caller.

        Processes start once `may_fork` is set, which says that no other thread has tensors on a device: a forked
        process frees what other threads had, and ends when it frees such a tensor.
        """
        has_fork = most_at_once > 1 and "fork" in multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("fork") if has_fork else None
        self._places = None if self._context is None else self._context.Semaphore(most_at_once)
        self._may_fork = may_fork
        self._waiting: list[Callable[[], Any]] = []
        self._started: list[Any] = []
        self._claims = tempfile.TemporaryDirectory()
        """Its files say which functions that launch kernels a process has begun to compile."""

    def start(self, job: Callable[[], Any]) -> None:
        """Compiles a kernel as soon as fewer than the most processes do."""
        if self._context is not None:
            self._waiting.append(job)
            if self._may_fork is None or self._may_fork.is_set():
                self._fork()

    def start_waiting(self, most_seconds: float | None) -> None:
        """Waits until processes may start, None: as long as it takes; starts those that could not start yet."""
        if self._may_fork is not None and self._may_fork.wait(most_seconds):
            self._fork()

    def join(self, most_seconds: float | None) -> None:
        """Waits for all processes; None: as long as it takes."""
        self.start_waiting(most_seconds)
        until = time.monotonic() + (most_seconds or 0.0)
        for process in self._started:
            process.join(None if most_seconds is None else max(0.0, until - time.monotonic()))
            process.kill()  # without effect where it has ended
        self._claims.cleanup()

    def _fork(self) -> None:
        for job in self._waiting:
            assert self._context is not None
            process = self._context.Process(target=partial(self._work, job), daemon=True)
            with suppress(OSError):  # there are as many processes as the system allows
                process.start()
                self._started.append(process)
        self._waiting.clear()

    def _work(self, job: Callable[[], Any]) -> None:
        assert self._places is not None
        logging.getLogger("triton").setLevel(logging.ERROR)  # of what is compiled for a device that is not here
        with self._places, suppress(Exception):
            kernel = job()
            # A C function that launches kernels of Triton with such arguments, which is compiled, too, but once.
            claim = hashlib.sha256(repr([*kernel.src.signature.values()]).encode()).hexdigest()
            Path(self._claims.name, claim).touch(exist_ok=False)
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


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
    """Returns the counter of this process, shared by all threads."""
    return Compilations()
