"""A CUDA device without free memory: only the request that needs too much ends.

On a CPU `tests/runtime/engine/test_isolation_runs.py` tests the same decisions with simulated errors.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import InternalError, RequestRefused
from kestrel_runtime.api.requests import Query
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.poison_requests import fingerprint_of
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.engine.test_isolation import ENCODE, POISON, PREFILL, bystanders, outcome, outcomes, watch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    config = EngineConfig(model=str(MD3_SMALL), device="cuda", max_batch_size=8, num_kv_pages=1024)
    engine = LocalEngine(LoadedModel.load(config), config)
    yield engine
    await asyncio.to_thread(engine.close)


def take_all_memory() -> None:
    """Ask for more than there is. Raises `torch.OutOfMemoryError`, as a step that needs too much does."""
    torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")


async def test_a_request_that_needs_more_than_there_is_ends_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    num_runs_alone = 0

    def look(sequences: list[TokenSequence]) -> None:
        nonlocal num_runs_alone
        if any(item.request.fingerprint == fingerprint_of(POISON) for item in sequences):
            num_runs_alone += len(sequences) == 1
            take_all_memory()

    watch(monkeypatch, ENCODE, look)
    before = torch.cuda.memory_allocated()
    *others, poison_outcome = await outcomes(engine, [*bystanders(), POISON])
    assert not [item for item in others if isinstance(item, Exception)]
    assert isinstance(poison_outcome, InternalError)
    assert isinstance(poison_outcome.__cause__, torch.OutOfMemoryError)
    assert num_runs_alone >= 2
    assert isinstance(await outcome(engine.submit(POISON)), RequestRefused)
    assert engine.status is EngineStatus.SERVING
    assert torch.cuda.memory_allocated() - before < 64 * 2**20


async def test_memory_that_is_short_only_within_a_batch_ends_no_request(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    num_shared = 0

    def look(sequences: list[TokenSequence]) -> None:
        nonlocal num_shared
        num_shared += len(sequences) > 1
        if len(sequences) > 1 and num_shared % 3 == 1:
            take_all_memory()

    watch(monkeypatch, PREFILL, look)
    requests = [*bystanders(), *(Query(f"question {number}") for number in range(6))]
    ends = await outcomes(engine, requests)
    assert not [item for item in ends if isinstance(item, Exception)]
    assert num_shared
    assert engine.status is EngineStatus.SERVING
    assert engine.load().num_used_pages == 0
