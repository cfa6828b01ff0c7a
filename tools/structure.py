"""Prints how large the code is and what makes it hard to read, as a table before and after a change of its layout.

    python -m tools.structure            # without running anything of the product
    python -m tools.structure --trace    # also what one query with a picture enters; serves the built-in model
    python -m tools.structure --list     # also where each of the counted things is

Lines are those of files of Python that people write, blank ones and comments included.
"""

import argparse
import ast
import asyncio
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tools import prose
from tools.source import CHECKOUT, ROOTS, Module, cycles, imports_of, modules_of, product_modules

FEATURES = (
    ("adapters", r"adapter|lora|low_rank"),
    ("constraints of answers", r"constraint|grammar"),
    ("experts of Moondream 3", r"expert|int4"),
    ("several processes", r"/host/|/processes/|supervis|engine_channel|multiprocess|front_?end_process"),
    ("Triton's API", r"/frontends/triton|tests/.*triton(?!_)"),
    ("OpenAI's API", r"openai"),
    ("the page for browsers", r"/web_ui/|/page/|_page\.py|/page\.py"),
    ("REST and HTTP", r"/frontends/(http|rest)|/http"),
    ("gRPC", r"/frontends/grpc"),
    ("batch", r"/batch"),
    ("load generator", r"/cli/bench"),
    ("evaluate, accept, verify", r"evaluat|accept|verify|verif"),
    ("stored and remote images", r"/images/"),
    ("decoding of images", r"/imaging/|images?"),
    ("metrics, traces, logs", r"telemetry|metric|trac"),
    ("access", r"/access/"),
    ("options", r"/config/"),
    ("commands", r"/cli/"),
    ("kernels", r"kernels/|/kernels"),
    ("the model", r"/moondream/|/models/|/loading/"),
    ("engine and scheduler", r"kestrel_runtime/|/runtime/"),
    ("client", r"clients?/"),
)
"""Features by what their paths hold, the first that matches counts. The rest is `other`."""

_STANDARD = frozenset(sys.stdlib_module_names)
_UNDOCUMENTED = ("uvicorn.protocols", "triton.runtime.driver", "triton.compiler", "hypothesis.internal")
"""Modules that their libraries do not document, although no underscore says so."""


def feature_of(path: Path) -> str:
    """Returns the feature that a file belongs to."""
    text = f"/{path.relative_to(CHECKOUT).as_posix()}"
    return next((name for name, pattern in FEATURES if re.search(pattern, text)), "other")


def line_table() -> list[str]:
    """Returns the lines of a table: a row for each feature, a column each for product, tests and benches."""
    counts: Counter[tuple[str, str]] = Counter()
    parts = {"product": product_modules()}
    for part, folders in (("tests", ("tests",)), ("bench", ("bench",)), ("training", ("training",))):
        parts[part] = [module for folder in folders for module in modules_of(CHECKOUT / folder, folder)]
    for part, modules in parts.items():
        for module in modules:
            counts[feature_of(module.path), part] += module.text.count("\n")
    names = [*(name for name, _ in FEATURES), "other"]
    rows = [f"| lines by feature | {' | '.join(parts)} |", f"|---|{'---|' * len(parts)}"]
    for name in names:
        rows.append(f"| {name} | {' | '.join(f'{counts[name, part]:,}' for part in parts)} |")
    totals = [sum(counts[name, part] for name in names) for part in parts]
    rows.append(f"| all | {' | '.join(f'{total:,}' for total in totals)} |")
    return rows


def package_table() -> list[str]:
    """Returns the lines of a table: modules and lines of each package of the product."""
    modules: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for module in product_modules():
        package = _package_of(module)
        modules[package] += 1
        lines[package] += module.text.count("\n")
    return ["| package | modules | lines |", "|---|---|---|"] + [
        f"| {package} | {modules[package]} | {lines[package]:,} |" for package in sorted(modules)
    ]


def fragments() -> Iterator[str]:
    """Yields the docstrings of the product that begin with a fragment, with their places."""
    for module in product_modules():
        yield from prose.fragments(module)


def private_parts() -> Iterator[str]:
    """Yields the private names of libraries that the product or its tests use, with their places.

    The standard library is left out: it documents some names that begin with an underscore.
    """
    tests = list(modules_of(CHECKOUT / "tests", "tests"))
    for module in [*product_modules(), *tests]:
        foreign: set[str] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
                foreign.update(local for name, local in names if _is_foreign(name))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level and _is_foreign(node.module):
                names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
                foreign.update(local for _, local in names)
            else:
                continue
            for name, _ in names:
                is_private = any(_is_private(part) for part in name.split("."))
                if _is_foreign(name) and (is_private or name.startswith(_UNDOCUMENTED)):
                    yield f"{_place(module, node.lineno)}: {name}"
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(value, name):
                    pass
                case ast.Subscript(ast.Call(ast.Name("vars"), [value]), ast.Constant(str(name))):
                    pass
                case _:
                    continue
            base = ast.unparse(value)
            if _is_private(name) and base.partition(".")[0] in foreign and re.fullmatch(r"[\w.]+", base):
                yield f"{_place(module, node.lineno)}: {base}.{name}"


def cycles_of_modules() -> list[list[str]]:
    """Returns the groups of modules of the product that import each other, at the time of their import."""
    modules = product_modules()
    names = {module.name for module in modules}
    return cycles({module.name: imports_of(module, names) for module in modules})


def cycles_of_packages() -> list[list[str]]:
    """Returns the groups of packages of the product that import each other."""
    modules = product_modules()
    package_of = {module.name: _folder_of(module) for module in modules}
    arrows: dict[str, set[str]] = {}
    for module in modules:
        own = package_of[module.name]
        arrows.setdefault(own, set()).update(
            other
            for name in imports_of(module, package_of)
            if (other := package_of[name]) != own
            # A package and what lies inside it are one subject.
            and not other.startswith(f"{own}.")
            and not own.startswith(f"{other}.")
        )
    return cycles(arrows)


def traced_query() -> tuple[int, int, Counter[str]]:
    """Returns how many modules and functions of the product one query with a picture enters, and how often each
    package is called. Asks a server of this process, which serves the built-in model, twice; the second counts."""
    entered: set[tuple[str, str]] = set()
    packages: Counter[str] = Counter()
    is_on = threading.Event()
    name_of = {str(module.path): module.name for module in product_modules()}

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not is_on.is_set():
            return
        name = name_of.get(frame.f_code.co_filename)
        if name is not None and not name.startswith("kestrel_client."):
            entered.add((name, frame.f_code.co_qualname))
            packages[".".join(name.split(".")[:2])] += 1

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        _ask_twice(is_on)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return len({name for name, _ in entered}), len(entered), packages


def _ask_twice(is_on: threading.Event) -> None:
    # Imported here, since the other tables need neither the server nor torch.
    from kestrel_client import AsyncClient
    from kestrel_grpc.config.options import ServerConfig
    from kestrel_grpc.server import Server
    from kestrel_runtime.engine.engine import LocalEngine

    picture = (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()

    async def ask() -> None:
        config = ServerConfig(port=0)
        engine = await asyncio.to_thread(LocalEngine.start, config.engine_config())
        async with Server(engine, config) as server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            await client.query(picture, "What is in this image?").result()
            is_on.set()
            await client.query(picture + b"\0", "How many shapes are there?").result()
            is_on.clear()

    asyncio.run(ask())


def _is_foreign(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in _STANDARD and top not in ROOTS and top not in {"tests", "bench", "training", "tools"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _package_of(module: Module) -> str:
    """Returns the first two parts of a module's package, such as `kestrel_grpc.cli`."""
    return ".".join(_folder_of(module).split(".")[:2])


def _folder_of(module: Module) -> str:
    """Returns the package that a module lies in; a package lies in itself."""
    return module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]


def _place(module: Module, line: int) -> str:
    return f"{module.path.relative_to(CHECKOUT)}:{line}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="ask a server, and count what the query enters")
    parser.add_argument("--list", action="store_true", help="name the places of what is counted")
    chosen = parser.parse_args(arguments)
    print(*line_table(), "", *package_table(), "", sep="\n")
    counted = {
        "docstrings that begin with a fragment": list(fragments()),
        "private parts of libraries": list(private_parts()),
        "cycles of modules": [" ".join(group) for group in cycles_of_modules()],
        "cycles of packages": [" ".join(group) for group in cycles_of_packages()],
    }
    print("| what | count |", "|---|---|", sep="\n")
    for name, places in counted.items():
        print(f"| {name} | {len(places)} |")
    if chosen.trace:
        num_modules, num_functions, packages = traced_query()
        print(f"| modules that a query with a picture enters | {num_modules} |")
        print(f"| functions that it enters | {num_functions} |")
        print(*(f"| calls into {name} | {count} |" for name, count in packages.most_common()), sep="\n")
    if chosen.list:
        for name, places in counted.items():
            print("", f"{name}:", *(f"    {place}" for place in places), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
