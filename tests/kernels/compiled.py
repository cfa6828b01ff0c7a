"""Compiles what operations launch for a Hopper device, without one, and says how their programs use memory.

A process of its own, because the tests run kernels in Triton's interpreter, which compiles nothing: functions of
`tests.kernels.launched` call operations on CPU tensors, and every launch is compiled instead of run.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

_ARCHITECTURE = 90
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


def launches(calls: list[tuple[str, list[Any]]], cache: str) -> list[list[Launch]]:
    """What each call launches, a function of `tests.kernels.launched` and its arguments; `cache` is a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"],
        input=json.dumps(calls),
        env=environment | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        [
            Launch(kernel, tuple(Access(**access | {"shape": tuple(access["shape"])}) for access in found))
            for kernel, found in of_call
        ]
        for of_call in json.loads(done.stdout)
    ]


class _Compiled(Exception):
    """Ends a compilation; the argument is Triton's GPU code."""


def gpu_code(function: Any, given: dict[str, Any], options: dict[str, int]) -> str:
    """Triton's code of a kernel with given arguments, by name, with its layouts; no machine code is made of it."""
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
        triton.compile(source, target=GPUTarget("cuda", _ARCHITECTURE, 32), options=options)
    except _Compiled as done:
        return done.args[0]
    raise AssertionError("the compilation did not come to Triton's GPU code")


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


def _main() -> None:
    jit = importlib.import_module("triton.runtime.jit")
    backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    launched = importlib.import_module("tests.kernels.launched")
    found: list[tuple[str, list[dict[str, Any]]]] = []

    def record(function: Any, *arguments: Any, **more: Any) -> None:
        given = dict(zip(function.arg_names, arguments, strict=False)) | more
        options = {name: more[name] for name in ("num_warps", "num_stages", "maxnreg") if more.get(name)}
        code = gpu_code(function, given, options)
        found.append((function.fn.__name__, [asdict(access) for access in accesses(code)]))

    def stop(module: Any, metadata: Any) -> None:
        raise _Compiled(str(module))

    def add_stages(self: Any, stages: dict[str, Any], *more: Any) -> None:
        all_stages(self, stages, *more)
        stages["llir"] = stop

    all_stages = backend.add_stages
    backend.add_stages = add_stages
    jit.JITFunction.run = record
    results = []
    for name, arguments in json.load(sys.stdin):
        found.clear()
        getattr(launched, name)(*arguments)
        results.append(list(found))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    _main()
