"""Two hundred of the bodies of `bodies.py`; `python -m tests.fuzzing.run_bodies` has as many as are asked for."""

from collections.abc import Iterator

import pytest

from tests.fuzzing.bodies import PATHS, Target, target

pytestmark = pytest.mark.usefixtures("warm_starts")
_MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    """One for all APIs, which must end as told after all of them."""
    with target() as running:
        yield running


@pytest.mark.parametrize("api", PATHS)
def test_hostile_bodies_are_answered_as_documented(api: str, server: Target):
    server.hear_all(api, range(50))
    before = server.rss_bytes
    outcomes = server.hear_all(api, range(50, 200))
    assert server.rss_bytes - before < 64 * _MIB
    assert outcomes["200"] > 0, outcomes
    assert outcomes["400"] > 0
    assert outcomes["403"] > 0
