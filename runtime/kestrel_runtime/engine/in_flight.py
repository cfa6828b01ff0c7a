"""A step between its launch and its report. Plain data; the loop keeps a few of them in order."""

from __future__ import annotations

from typing import NamedTuple

from kestrel_runtime.execution.step_runner import StepHandle
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.page_manager import StepId


class InFlightStep(NamedTuple):
    """One step that was launched and is not complete.

    Its batch names the steps that it depends on by id: an object would keep that step, its sequences and their
    images alive, and through it all steps before.
    """

    id: StepId
    batch: Batch
    handle: StepHandle

    def __str__(self) -> str:
        return f"step {self.id}, a {describe(self.batch)}"


def describe(batch: Batch) -> str:
    """A step's batch, for logs: names sequences by fingerprint, which does not reveal the request."""
    names = ", ".join(sequence.fingerprint or str(sequence.id) for sequence in batch.sequences)
    return f"{batch.kind} step of {names}"
