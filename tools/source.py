"""Finds the Python modules of this checkout by package, and the imports between them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
ROOTS = {
    "kestrel_grpc": CHECKOUT / "kestrel_grpc",
    "kestrel_runtime": CHECKOUT / "runtime" / "kestrel_runtime",
    "kestrel_ops": CHECKOUT / "kernels" / "kestrel_ops",
    "kestrel_client": CHECKOUT / "clients" / "python" / "kestrel_client",
}
"""The packages of the product, with their folders."""


@dataclass(frozen=True)
class Module:
    """One file of Python that people write."""

    name: str
    """Its full name, such as `kestrel_grpc.cli.serve`; a package is named without `__init__`."""
    path: Path

    @cached_property
    def text(self) -> str:
        """Returns the source."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Returns the syntax tree of the source."""
        return ast.parse(self.text)


def product_modules() -> list[Module]:
    """Returns the modules of the product, without generated ones."""
    return [module for name, folder in ROOTS.items() for module in modules_of(folder, name)]


def modules_of(folder: Path, package: str) -> Iterator[Module]:
    """Yields the modules below a folder, without generated ones, in the order of their paths."""
    for path in sorted(folder.rglob("*.py")):
        if path.stem.endswith(("_pb2", "_pb2_grpc")):
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        yield Module(".".join((package, *parts)).removesuffix(".__init__"), path)


def imports_of(module: Module, names: Iterable[str]) -> set[str]:
    """Returns which of `names` a module imports when it is imported itself.

    Imports inside functions and those for type checkers alone are left out: neither makes a cycle.
    """
    known = set(names)
    found: set[str] = set()
    for node in _import_time(module.tree.body):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return (found & known) - {module.name}


def cycles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the groups of names that reach each other along the arrows, each in order."""
    reached = {name: _reachable(name, arrows) for name in arrows}
    groups = {
        tuple(sorted({other for other in reached[name] if name in reached[other]}))
        for name in arrows
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reachable(name: str, arrows: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    open_names = [name]
    while open_names:
        for other in arrows.get(open_names.pop(), ()):
            if other not in found:
                found.add(other)
                open_names.append(other)
    return found


def _import_time(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _import_time(node.body)
            yield from _import_time(node.orelse)
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from _import_time(node.body)
        else:
            yield node
