"""Generic modules work without the model families that come with the engine."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.reference_fixtures import CHECKOUT
from tests.test_architecture import PACKAGES, is_of_a_family, modules

# Modules that import Moondream, themselves or by what they import: none may.
NEED_A_FAMILY = set[str]()
GENERIC_TESTS = ("api", "engine", "execution", "imaging", "loading", "memory", "scheduling", "verify")
NEEDS_MOONDREAM = re.compile(
    r"\bmoondream[23]\b[:)]|runtime\.models\.moondream\b|LoadedModel\.load\(|LocalEngine\.start\(EngineConfig\(device"
)
SOME_GENERIC_TESTS = (
    "tests/runtime/output/test_output_parser.py",
    "tests/runtime/execution/test_step_runner.py",
    "tests/runtime/models/second_family",
)

# One process for both, so that the libraries are imported once. The tests come first: they set up what modules read
# while they are imported.
_TEST_AND_IMPORT_EACH = """
import importlib, json, sys
import pytest
modules, tests = map(json.loads, sys.argv[1:])
status = pytest.main(["-q", "-n", "0", "-p", "tests.runtime.without_moondream", *tests])
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        print(f"not imported: {name}")
sys.exit(status)
"""


@dataclass(frozen=True)
class WithoutMoondream:
    """What a process that cannot import Moondream did."""

    not_imported: set[str]
    status: int
    printed: str


@pytest.fixture(scope="module")
def without_moondream() -> WithoutMoondream:
    runtime = PACKAGES["kestrel_runtime"]
    names = [".".join(path.relative_to(runtime.parent).with_suffix("").parts) for path in modules(runtime)]
    generic = [name for name in names if not is_of_a_family(name)]
    # A part of the tests, for time; docs/architecture.md says how to run all.
    command = (sys.executable, "-c", _TEST_AND_IMPORT_EACH, json.dumps(generic), json.dumps(SOME_GENERIC_TESTS))
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=CHECKOUT)
    not_imported = set(re.findall(r"^not imported: (\S+)$", done.stdout, re.MULTILINE))
    return WithoutMoondream(not_imported, done.returncode, done.stdout + done.stderr)


def test_generic_modules_can_be_imported_without_moondream(without_moondream):
    assert without_moondream.not_imported == NEED_A_FAMILY


def test_generic_tests_pass_without_moondream(without_moondream):
    assert without_moondream.status == 0, without_moondream.printed
    assert " passed" in without_moondream.printed or "[100%]" in without_moondream.printed


def test_generic_tests_load_no_checkpoint_of_a_family():
    # Only their own families: fixtures with a Moondream are in tests/runtime/models/moondream/conftest.py.
    folders = [CHECKOUT / "tests" / "runtime" / name for name in GENERIC_TESTS]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 60
    needs_moondream = re.compile(
        r"\bmoondream[23]:|getfixturevalue\(\"moondream|runtime\.models\.moondream\b|LoadedModel\.load\("
    )
    assert [file.name for file in files if needs_moondream.search(file.read_text(encoding="utf-8"))] == []
