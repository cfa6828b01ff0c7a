"""Changes single functions of the product, and reports whether the tests notice.

    python -m tools.mutants draw --seed 1 --count 60           # prints the names of the drawn mutants
    python -m tools.mutants run build/mutants.json --seed 1    # runs the tests on each; goes on where it stopped

A mutant is a function, an operator and a number, such as `Admission.enter: compare 2`: the second comparison of
that function becomes another one. Mutants are drawn from all functions of the product, no function twice. The
name has no path, so that the same mutants are found after a module has moved. Each runs in a copy of the
checkout, first with the tests of the folder that mirrors its module, then with those of the journeys; a test
that fails has noticed it. Where Triton's interpreter does not run a kernel, its mutants need a GPU.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.source import CHECKOUT, Module, product_modules

TIMEOUT_S = 900.0
"""A mutant whose tests take longer has been noticed: it hangs."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one function."""

    module: Module
    function: str
    """The qualified name inside the module."""
    operator: str
    number: int
    """Counts the places of the operator in the function, from 1."""
    is_ambiguous: bool
    """True if another module has a function of this name."""

    @property
    def name(self) -> str:
        """Returns its name, which does not change when its module moves to another folder."""
        stem = f"{self.module.path.stem}." if self.is_ambiguous else ""
        return f"{stem}{self.function}: {self.operator} {self.number}"

    def source(self) -> str:
        """Returns the source of the module with the change."""
        tree = copy.deepcopy(self.module.tree)
        function = next(node for name, node in _functions(tree) if name == self.function)
        places = list(_places(function))
        same = [change for operator, change in places if operator == self.operator]
        same[self.number - 1]()
        return ast.unparse(ast.fix_missing_locations(tree))


def all_mutants() -> list[Mutant]:
    """Returns every mutant of the product, in an order that does not depend on where modules lie."""
    modules = product_modules()
    homes = Counter(function for module in modules for function, _ in _functions(module.tree))
    found: list[Mutant] = []
    for module in modules:
        for function, node in _functions(module.tree):
            is_ambiguous = homes[function] > 1
            counts: dict[str, int] = {}
            for operator, _ in _places(node):
                counts[operator] = counts.get(operator, 0) + 1
                found.append(Mutant(module, function, operator, counts[operator], is_ambiguous))
    return sorted(found, key=lambda mutant: mutant.name)


def drawn(seed: int, count: int) -> list[Mutant]:
    """Returns `count` mutants of as many functions, the same ones for the same seed and the same functions."""
    chance = random.Random(seed)
    mutants = all_mutants()
    chance.shuffle(mutants)
    found: dict[str, Mutant] = {}
    for mutant in mutants:
        if len(found) == count:
            break
        found.setdefault(mutant.name.partition(":")[0], mutant)
    return list(found.values())


def tests_of(module: Module) -> list[str]:
    """Returns the folders and files of tests that may notice a change of a module, the most likely ones first."""
    package, *parts = module.name.split(".")
    root = {
        "kestrel_grpc": CHECKOUT / "tests" / "server",
        "kestrel_runtime": CHECKOUT / "tests" / "runtime",
        "kestrel_ops": CHECKOUT / "tests" / "kernels",
        "kestrel_client": CHECKOUT / "tests" / "client",
    }[package]
    found: list[Path] = []
    mirrored = root.joinpath(*parts[:-1], f"test_{parts[-1]}.py") if parts else root
    folder = root.joinpath(*parts[:-1]) if parts else root
    while not folder.exists():
        folder = folder.parent
    found += [path for path in (mirrored, folder) if path.exists()]
    if folder != root:
        found.append(root)
    found.append(CHECKOUT / "tests" / "journey")
    if parts[:1] == ["host"]:
        found.insert(0, CHECKOUT / "tests" / "host")
    return [str(path.relative_to(CHECKOUT)) for path in found]


def run(mutant: Mutant, copied: Path, workers: int) -> str:
    """Returns the test that notices a mutant, "hangs", or "survives". `copied`: a copy of the checkout."""
    relative = mutant.module.path.relative_to(CHECKOUT)
    target = copied / relative
    before = target.read_text(encoding="utf-8")
    target.write_text(mutant.source(), encoding="utf-8")
    sources = [str(copied / folder) for folder in (".", "runtime", "kernels", "clients/python")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
    end = time.monotonic() + TIMEOUT_S
    try:
        for tests in tests_of(mutant.module):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-n", str(workers)]
            done = subprocess.run(
                [*command, "--dist", "worksteal", tests],
                cwd=copied,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=max(1.0, end - time.monotonic()),
            )
            if done.returncode not in (0, 5):  # 5: no test was collected
                lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return lines[0] if lines else f"pytest ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        target.write_text(before, encoding="utf-8")
    return "survives"


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def _places(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields each operator that applies to a place in the body of a function, with the change that it makes."""
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
                yield "compare", _setting(node, "ops", [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
            elif isinstance(node, ast.BoolOp):
                yield "and or", _setting(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
            elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
                yield "arithmetic", _setting(node, "op", _ARITHMETIC[type(node.op)]())
            elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
                yield "constant", _setting(node, "value", not node.value)
            elif isinstance(node, ast.Constant) and isinstance(node.value, int):
                yield "constant", _setting(node, "value", node.value + 1)
            elif isinstance(node, ast.If | ast.While | ast.IfExp):
                yield "condition", _setting(node, "test", ast.UnaryOp(ast.Not(), node.test))
            elif isinstance(node, ast.Return) and node.value is not None:
                yield "return", _setting(node, "value", ast.Constant(None))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
                yield "call", _setting(node, "value", ast.Constant(None))


def _setting(node: ast.AST, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws mutants, or runs the tests on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("draw", "run"):
        command = commands.add_parser(name)
        command.add_argument("--seed", type=int, default=1, help="default: %(default)s")
        command.add_argument("--count", type=int, default=60, help="default: %(default)s")
        if name == "run":
            command.add_argument("results", type=Path, help="a JSON file of outcomes; those in it are kept")
            command.add_argument("--workers", type=int, default=2, help="of pytest (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    mutants = drawn(chosen.seed, chosen.count)
    if chosen.command == "draw":
        print(*(f"{mutant.module.path.relative_to(CHECKOUT)}: {mutant.name}" for mutant in mutants), sep="\n")
        return 0
    results = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        copied = Path(scratch) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "node_modules", "__pycache__")
        shutil.copytree(CHECKOUT, copied, ignore=ignored, symlinks=True)
        for mutant in mutants:
            if mutant.name not in results:
                results[mutant.name] = run(mutant, copied, chosen.workers)
                chosen.results.parent.mkdir(parents=True, exist_ok=True)
                chosen.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                print(f"{mutant.name}: {results[mutant.name]}", flush=True)
    survivors = [name for name, outcome in results.items() if outcome == "survives"]
    print(f"{len(results) - len(survivors)} of {len(results)} mutants were noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
