"""What holds for every test: generated examples are the same in every run, and no clock judges them."""

import gc
import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Several processes of tests share the processors, and so do the servers that they start as processes: threads that
# wait for each other inside an operation would cost more than they save. Torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests import warm

# Read when a kernel is defined, so before anything imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONG_SET_UPS = {"test_packages.py", "test_readme.py", "test_http_docs.py", "test_host.py", "test_compiled.py"}

# A red run then speaks of the change, not of the draw or of a busy machine.
settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
settings.load_profile("reproducible")

# Hypothesis also draws numbers and words from the source of our modules that are imported. What it draws would
# depend on which tests run together, and to read the modules takes a second or two in each process.
# It has no setting for this; tests/test_contributing.py fails where it no longer asks this function.
providers._get_local_constants = lambda: providers._local_constants

# Also where the variable says otherwise: the models of the tests are small.
torch.set_num_threads(1)

# A shell that runs the tests in the background ignores SIGINT, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported and collected stays to the end. To look for garbage among it would take most of the time of tests
# that collect garbage.
gc.disable()


def pytest_collection(session: pytest.Session) -> None:
    """Where processes share all tests, the second imports modules from the last one on: each of the two rewrites
    the assertions of half of them, and finds the others as the other process has left them."""
    is_whole = session.config.args == session.config.getini("testpaths")
    if is_whole and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        tests = Path(__file__).parent
        for path in (*sorted(tests.rglob("conftest.py")), *sorted(tests.rglob("test_*.py"), reverse=True)):
            # What is wrong with a module is told when it is collected.
            with suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(path.relative_to(tests.parent).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """From here on garbage is collected among what tests make."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries complain of what they find when the process ends and the collector has not seen."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with the longest set-ups come first. Processes that share the tests take them from each other at the
    end; so no two of them make such a set-up, and none is left with it when the others are done."""
    items.sort(key=lambda item: item.path.name not in LONG_SET_UPS)


@pytest.fixture(scope="module")
def warm_starts() -> Iterator[None]:
    """For modules whose tests start servers or other programs of Python: these begin with the packages imported."""
    with warm.starts():
        yield
