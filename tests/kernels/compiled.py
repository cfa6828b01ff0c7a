"""Compiles what operations launch for a device, without one, and says how their programs use memory and registers.

A process of its own, because the tests run kernels in Triton's interpreter, which compiles nothing: functions of
`tests.kernels.launched` call operations on CPU tensors, and every launch is compiled instead of run.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
_TYPES |= {"int64": "i64", "int32": "i32", "uint8": "u8"}
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


def launches(calls: list[Call], cache: str) -> list[list[Launch]]:
    """What each call launches on Hopper, a function of `tests.kernels.launched` and its arguments; `cache` is a
    folder."""
    return [
        [
            Launch(kernel, tuple(Access(**access | {"shape": tuple(access["shape"])}) for access in found))
            for kernel, found in of_call
        ]
        for of_call in _compiled("accesses", "9.0", calls, cache)
    ]


def resources(card: str, calls: list[Call], cache: str, *, unlike: str | None = None) -> list[list[Resources]]:
    """What the kernels take that each call launches on a card of `SHARED_BYTES`, as assembled for it.

    Launches that are planned alike for another card, `unlike`, are left out.
    """
    return [
        [Resources(kernel, *found) for kernel, found in of_call]
        for of_call in _compiled("resources", card, calls, cache, *([unlike] if unlike else ()))
    ]


def _compiled(what: str, card: str, calls: list[Call], cache: str, *unlike: str) -> list[list[tuple[str, Any]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", what, card, *unlike],
        input=json.dumps(calls),
        env=environment | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class _Compiled(Exception):
    """Ends a compilation; the arguments are what it has come to and what is known about it."""


def compiled(function: Any, given: dict[str, Any], options: dict[str, int], architecture: int) -> tuple[Any, Any]:
    """The last stage of compiling a kernel with given arguments, by name, and what Triton notes about it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    try:
        triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
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


def _main(what: str, card: str, unlike: str = "") -> None:
    gc.disable()  # which takes a tenth of the time, and there is memory for all
    jit = importlib.import_module("triton.runtime.jit")
    backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    launched = importlib.import_module("tests.kernels.launched")
    limits, last_stage = _limits(card), {"accesses": "llir", "resources": "cubin"}[what]
    major, minor = map(int, card.split("."))
    architecture = 10 * major + minor
    found: list[tuple[str, Any]] = []
    planned: set[str] = set()

    def record(function: Any, *arguments: Any, **more: Any) -> None:
        given = dict(zip(function.arg_names, arguments, strict=False)) | more
        options = {name: more[name] for name in ("num_warps", "num_stages", "maxnreg") if more.get(name)}
        plan = _plan(function, given, options)
        if assumed is not limits:
            planned.add(plan)
            return
        if plan in planned:
            return
        code, metadata = compiled(function, given, options, architecture)
        if what == "accesses":
            found.append((function.fn.__name__, [asdict(access) for access in accesses(code)]))
        else:
            found.append((function.fn.__name__, assembled(code, metadata, architecture)))

    def stop(module: Any, metadata: Any) -> None:
        raise _Compiled(str(module), dict(metadata))

    def add_stages(self: Any, stages: dict[str, Any], *more: Any) -> None:
        all_stages(self, stages, *more)
        stages[last_stage] = stop

    all_stages = backend.add_stages
    backend.add_stages = add_stages
    jit.JITFunction.run = record
    results = []
    for name, arguments in json.load(sys.stdin):
        found.clear()
        planned.clear()
        for assumed in (*([_limits(unlike)] if unlike else ()), limits):
            # Of the CPU, on which the tensors are.
            DeviceLimits.of = staticmethod(lambda device, assumed=assumed: assumed)
            getattr(launched, name)(*arguments)
        results.append(list(found))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    _main(*sys.argv[1:])
