"""One server over HTTP for the tests of a module."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.server.http_calls import HttpServing, serving_http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_rig() -> AsyncIterator[HttpServing]:
    """Shared by the tests of a module, which run on the module's event loop."""
    async with serving_http() as rig:
        yield rig


@pytest.fixture
def rig(module_rig: HttpServing) -> HttpServing:
    """The server of the module, whose engine has had no request of this test yet."""
    module_rig.engine.requests.clear()
    return module_rig
