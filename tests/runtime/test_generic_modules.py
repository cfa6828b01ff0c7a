"""Generic modules work without the model families that come with the engine."""

import re
import subprocess
import sys

from tests.reference_fixtures import CHECKOUT
from tests.test_architecture import PACKAGES, is_of_a_family, modules

# Modules that import Moondream, themselves or by what they import: none may.
NEED_A_FAMILY = set[str]()
GENERIC_TESTS = (
    "api",
    "engine",
    "execution",
    "imaging",
    "loading",
    "memory",
    "scheduling",
    "verify",
)
NEEDS_MOONDREAM = re.compile(
    r"\bmoondream[23]\b[:)]|runtime\.models\.moondream\b|LoadedModel\.load\(|LocalEngine\.start\(EngineConfig\(device"
)
SOME_GENERIC_TESTS = (
    "tests/runtime/scheduling/test_output_parser.py",
    "tests/runtime/execution/test_step_runner.py",
    "tests/runtime/engine/test_loop.py",
    "tests/runtime/engine/test_preprocessing.py",
    "tests/runtime/models/second_family",
    "tests/runtime/verify",
)

_IMPORT_EACH = """
import importlib, sys
sys.modules["kestrel_runtime.models.moondream"] = None  # imports of it raise ModuleNotFoundError
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        print(name)
"""


def test_generic_modules_can_be_imported_without_moondream():
    runtime = PACKAGES["kestrel_runtime"]
    names = [".".join(path.relative_to(runtime.parent).with_suffix("").parts) for path in modules(runtime)]
    generic = [name for name in names if not is_of_a_family(name)]
    command = (sys.executable, "-c", _IMPORT_EACH, *generic)
    failed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert set(failed) == NEED_A_FAMILY


def test_generic_tests_pass_without_moondream():
    # A part of them, for time; docs/architecture.md says how to run all.
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "tests.runtime.without_moondream",
        *SOME_GENERIC_TESTS,
    )
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=CHECKOUT)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout or "[100%]" in result.stdout


def test_generic_tests_load_no_checkpoint_of_a_family():
    # Only their own families: fixtures with a Moondream are in tests/runtime/models/moondream/conftest.py.
    folders = [CHECKOUT / "tests" / "runtime" / name for name in GENERIC_TESTS]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 60
    needs_moondream = re.compile(
        r"\bmoondream[23]:|getfixturevalue\(\"moondream|runtime\.models\.moondream\b|LoadedModel\.load\("
    )
    assert [file.name for file in files if needs_moondream.search(file.read_text(encoding="utf-8"))] == []
