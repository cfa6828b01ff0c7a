"""Compiles what operations launch for a device, without one, and says how their programs use memory and registers.

A process of its own, because the tests run kernels in Triton's interpreter, which compiles nothing: functions of
`tests.kernels.launched` call operations on CPU tensors, and every launch is compiled instead of run. The process
answers questions of `Compiler` until it is closed, one a line.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kestrel_ops.device_limits import HOPPER_SHARED_BYTES, PORTABLE_SHARED_BYTES, DeviceLimits

Call = tuple[str, list[Any]]
SHARED_BYTES = {
    "8.0": 163 * 1024,
    "8.6": PORTABLE_SHARED_BYTES,
    "8.9": PORTABLE_SHARED_BYTES,
    "9.0": HOPPER_SHARED_BYTES,
    "10.0": HOPPER_SHARED_BYTES,
    "12.0": PORTABLE_SHARED_BYTES,
}
"""Shared memory of a program, by compute capability."""
# The last word of ptxas on a kernel.
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_TYPES = {"float8_e4m3fn": "fp8e4nv", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_TYPES |= {"int64": "i64", "int32": "i32", "uint8": "u8", "bool": "i1"}
# Of Triton's GPU code: where pointers come from, how blocks lie on threads, and what goes to memory.
_ARGUMENT = re.compile(r"(%\w+): !tt\.ptr")
_CARRIED = re.compile(r"(%\w+) = (%\w+)(?=[,)])")
_DERIVED = re.compile(r"(%\w+) = \w+\.\w+ (%\w+)")
_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\], warpsPerCTA = \[(.*?)\]"
)
_ACCESS = re.compile(r"\b(?:tt\.(load|store|atomic_rmw)|ttg\.async_copy_global_to_local) (?:[a-z_]+, )*(%\w+)")
_BLOCK = re.compile(r"tensor<([\dx]+)x!tt\.ptr<\w+>(?:, (#\w+)>)?")
_BARRIER = re.compile(r"\b(gpu|ttg)\.(local_)?barrier\b")


@dataclass(frozen=True)
class Access:
    """One load, store, atomic addition or barrier of a program, in its order."""

    kind: str
    pointer: str = ""
    """The kernel's argument that it goes through."""
    shape: tuple[int, ...] = ()
    """Of the block; () for a scalar."""
    replicas: int = 1
    """Threads that hold each element of a block of two dimensions."""


@dataclass(frozen=True)
class Launch:
    """One kernel as it was to be launched."""

    kernel: str
    accesses: tuple[Access, ...]

    def in_place(self) -> set[str]:
        """The arguments that are both read and written."""
        kinds = {
            kind: {access.pointer for access in self.accesses if access.kind == kind} for kind in ("load", "store")
        }
        return kinds["load"] & kinds["store"]


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor."""

    kernel: str
    num_warps: int
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread: registers that are stored and loaded again."""
    shared_bytes: int


class Compiler:
    """The process that compiles, for as long as the block lasts; the same code is compiled once."""

    def __init__(self, cache: Path) -> None:
        """`cache` is a folder for what Triton writes."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(cache)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Compiler:
        return self

    def launches(self, calls: list[Call]) -> list[list[Launch]]:
        """What each call launches on Hopper, a function of `tests.kernels.launched` and its arguments."""
        return [
            [
                Launch(kernel, tuple(Access(**access | {"shape": tuple(access["shape"])}) for access in found))
                for kernel, found in of_call
            ]
            for of_call in self._ask("accesses", "9.0", calls)
        ]

    def resources(self, card: str, calls: list[Call], *, unlike: str | None = None) -> list[list[Resources]]:
        """What the kernels take that each call launches on a card of `SHARED_BYTES`, as assembled for it.

        Launches that are planned alike for another card, `unlike`, are left out.
        """
        return [
            [Resources(kernel, *found) for kernel, found in of_call]
            for of_call in self._ask("resources", card, calls, unlike)
        ]

    def _ask(
        self, what: str, card: str, calls: list[Call], unlike: str | None = None
    ) -> list[list[tuple[str, Any]]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([what, card, calls, unlike]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the process that compiles has ended"
        found, error = json.loads(line)
        assert error is None, error
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)


class _Compiled(Exception):
    """Ends a compilation; the arguments are what it has come to and what is known about it."""


def source_of(function: Any, given: dict[str, Any]) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """The types, the constants and the attributes with which a kernel is compiled for given arguments, by name."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, (int, float)):
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_divisible = value % 16 == 0 and not parameter.do_not_specialize
        else:
            signature[parameter.name], is_divisible = f"*{_TYPES[str(value.dtype)[6:]]}", True
        if is_divisible:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compiled(
    function: Any,
    source: tuple[dict[str, str], dict[Any, Any], dict[Any, Any]],
    options: dict[str, int],
    architecture: int,
) -> tuple[Any, Any]:
    """The last stage of compiling a kernel, and what Triton notes about it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = source
    try:
        triton.compile(
            ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", architecture, 32),
            options=options,
        )
    except _Compiled as done:
        return done.args
    raise AssertionError("the compilation came to its end")


def accesses(code: str) -> Iterator[Access]:
    """What a program of Triton's GPU code does to global memory."""
    layouts: dict[str, list[list[int]]] = {}
    origins: dict[str, str] = {}
    for line in code.splitlines():
        if layout := _LAYOUT.match(line):
            layouts[layout[1]] = [[int(number) for number in part.split(",")] for part in layout.groups()[1:]]
        elif "tt.func" in line:
            origins = {name: name for name in _ARGUMENT.findall(line)}
        elif _BARRIER.search(line):
            yield Access("barrier")
        elif access := _ACCESS.search(line):
            block = _BLOCK.search(line)
            shape = tuple(int(size) for size in block[1].split("x")) if block else ()
            replicas = 1
            if block and block[2] in layouts:
                held = zip(shape, *layouts[block[2]], strict=True)
                replicas = math.prod(max(each * threads * warps // size, 1) for size, each, threads, warps in held)
            yield Access(access[1] or "load", origins.get(access[2], "?").removeprefix("%"), shape, replicas)
        else:
            pairs = _CARRIED.findall(line) if "iter_args" in line else _DERIVED.findall(line)
            origins |= {name: origins[origin] for name, origin in pairs if origin in origins}


def assembled(ptx: str, metadata: dict[str, Any], architecture: int) -> list[int]:
    """Warps, registers, bytes of spilled registers and of shared memory of a kernel, by ptxas."""
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = f"--gpu-name={compiler.sm_arch_from_capability(architecture)}"
        done = subprocess.run(
            [compiler.get_ptxas(architecture).path, "-v", name, file.name, "-o", os.devnull],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (registers,) = _REGISTERS.findall(done.stderr)
    spilled = sum(map(int, _SPILLED.findall(done.stderr)))
    return [metadata["num_warps"], int(registers), spilled, metadata["shared"]]


def _limits(card: str) -> DeviceLimits:
    major, minor = map(int, card.split("."))
    return DeviceLimits((major, minor), SHARED_BYTES[card])


def _plan(function: Any, given: dict[str, Any], options: dict[str, int]) -> str:
    """What a launch has in common with those of the same code."""
    places = [(name, str(getattr(value, "dtype", value))) for name, value in given.items()]
    return repr((function.fn.__name__, places, options))


class _Compilations:
    """Answers questions, with launches replaced by compilations."""

    def __init__(self) -> None:
        jit = importlib.import_module("triton.runtime.jit")
        backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
        # What is written is not read again, and the key of it would be a hash of all of Triton's libraries.
        cache: Any = importlib.import_module("triton.runtime.cache")
        cache.triton_key = lambda: "not read again"
        self._launched = importlib.import_module("tests.kernels.launched")
        self._known: dict[str, Any] = {}
        self._record: Callable[..., None]
        self._last_stage = ""

        def stop(module: Any, metadata: Any) -> None:
            raise _Compiled(str(module), dict(metadata))

        def add_stages(own: Any, stages: dict[str, Any], *more: Any) -> None:
            all_stages(own, stages, *more)
            stages[self._last_stage] = stop

        all_stages = backend.add_stages
        backend.add_stages = add_stages
        jit.JITFunction.run = lambda function, *arguments, **more: self._record(function, *arguments, **more)

    def answer(self, what: str, card: str, calls: list[Call], unlike: str | None) -> list[list[tuple[str, Any]]]:
        """The kernels of each call, with their accesses or what they take, for a card."""
        self._last_stage = {"accesses": "llir", "resources": "cubin"}[what]
        return [self._launches(what, card, call, unlike) for call in calls]

    def _launches(self, what: str, card: str, call: Call, unlike: str | None) -> list[tuple[str, Any]]:
        planned: set[str] = set()
        if unlike is not None:
            self._record = lambda *arguments, **more: planned.add(_plan(*_launch(*arguments, **more)))
            self._run(call, unlike)
        found: list[tuple[str, Any]] = []

        def record(*arguments: Any, **more: Any) -> None:
            function, given, options = _launch(*arguments, **more)
            if _plan(function, given, options) not in planned:
                found.append((function.fn.__name__, self._compile(what, card, function, given, options)))

        self._record = record
        self._run(call, card)
        return found

    def _run(self, call: Call, card: str) -> None:
        """An operation on the CPU, on which the tensors are, as it is planned for a card."""
        limits, (name, arguments) = _limits(card), call
        DeviceLimits.of = staticmethod(lambda device: limits)
        getattr(self._launched, name)(*arguments)

    def _compile(
        self, what: str, card: str, function: Any, given: dict[str, Any], options: dict[str, int]
    ) -> list[Any]:
        source, architecture = source_of(function, given), int(card.replace(".", ""))
        key = repr((what, architecture, function.fn.__module__, function.fn.__name__, source, options))
        if key not in self._known:
            code, metadata = compiled(function, source, options, architecture)
            self._known[key] = (
                [asdict(access) for access in accesses(code)]
                if what == "accesses"
                else assembled(code, metadata, architecture)
            )
        return self._known[key]


def _launch(function: Any, *arguments: Any, **more: Any) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """A kernel, its arguments by name, and the options with which it is compiled."""
    given = dict(zip(function.arg_names, arguments, strict=False)) | more
    options = {name: more[name] for name in ("num_warps", "num_stages", "maxnreg") if more.get(name)}
    return function, given, options


def _main(cache: str) -> None:
    # Read when Triton is imported: the tests run kernels in its interpreter.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache
    gc.disable()  # which takes a tenth of the time, and there is memory for all
    compilations = _Compilations()
    for line in sys.stdin:
        try:
            answer = compilations.answer(*json.loads(line)), None
        except Exception:
            answer = None, traceback.format_exc()
        print(json.dumps(answer), flush=True)
    gc.freeze()  # nor does it look for garbage at its end


if __name__ == "__main__":
    _main(*sys.argv[1:])
