"""A canned server for every test that asks for one."""

from collections.abc import Iterator

import pytest

from kestrel_client import Client
from tests.client.canned import CannedVision, serving


@pytest.fixture
def vision() -> CannedVision:
    return CannedVision()


@pytest.fixture
def address(vision: CannedVision) -> Iterator[str]:
    with serving(vision) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client
