"""Benches start servers, and load them from processes."""

from collections.abc import Iterator

import pytest

from tests import warm


@pytest.fixture(scope="module", autouse=True)
def starts() -> Iterator[None]:
    """Programs of all tests here begin with the packages imported."""
    with warm.starts():
        yield
