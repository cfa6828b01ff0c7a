"""Over which channel the tests of the server ask the fake engine (`tests.over_sockets`)."""

import os
from collections.abc import Iterator

import pytest

from tests.over_sockets import SOCKETS, VARIABLE


@pytest.fixture(scope="module", autouse=True)
def engine_channel(request: pytest.FixtureRequest) -> Iterator[str]:
    """As the environment says, unless the module is run over both channels."""
    channel = getattr(request, "param", os.environ.get(VARIABLE, ""))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(VARIABLE, channel)
        yield channel


@pytest.fixture(autouse=True)
def _in_one_process(request: pytest.FixtureRequest, engine_channel: str) -> None:
    marker = request.node.get_closest_marker("one_process")
    if marker is not None and engine_channel == SOCKETS:
        pytest.skip(marker.args[0])
