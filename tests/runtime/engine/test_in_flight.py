"""A step in flight is logged by what it does and for whom, and never by what was asked."""

from typing import Any

from kestrel_runtime.engine.in_flight import InFlightStep
from kestrel_runtime.scheduling.batch import Batch, Chunk
from kestrel_runtime.scheduling.page_manager import StepId
from tests.runtime.fake_runner import FakeHandle, FakeRunner
from tests.runtime.sequences import new_sequence


def test_a_step_is_named_by_its_kind_its_id_and_its_sequences() -> None:
    first, second = new_sequence(3), new_sequence(3)
    first.fingerprint = "query-abc"
    for batch, expected in (
        (Batch.of_prefill(prefill=[Chunk(first, 0, 3)]), "step 7, a prefill step of query-abc"),
        (Batch.of_decode([first, second]), f"step 7, a decode step of query-abc, {second.id}"),
    ):
        handle: Any = FakeHandle(FakeRunner(), batch)
        assert str(InFlightStep(StepId(7), batch, handle)) == expected
