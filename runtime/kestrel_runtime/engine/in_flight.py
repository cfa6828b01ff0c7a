"""A step that was launched and is not reported yet. Plain data; the loop keeps a few of them in order."""

from __future__ import annotations

from typing import NamedTuple, NewType

from kestrel_runtime.execution.step_runner import Launch
from kestrel_runtime.scheduling.sequence import Batch, Sequence

StepId = NewType("StepId", int)
"""Counts the steps of a loop. Ids rise, so a step that was reported is never meant by mistake."""


class InFlightStep(NamedTuple):
    """One step between its launch and the moment when its tokens are handed out.

    It names the step that it depends on by id: an object would keep that step, its sequences and their images
    alive, and through it all steps before.
    """

    id: StepId
    batch: Batch
    sampled: list[Sequence]
    """Sequences that get a token from this step, as `Scheduler.commit` returned them."""
    handle: Launch
    depends_on: StepId | None
    """The prefill step that must be reported before this step."""

    def __str__(self) -> str:
        return f"step {self.id}, a {describe(self.batch)}"


def describe(batch: Batch) -> str:
    """A step's batch, for logs: names sequences by fingerprint, which does not reveal the request."""
    kind = "decode" if batch.decode else "prefill"
    names = ", ".join(sequence.fingerprint or str(sequence.id) for sequence in batch.members)
    return f"{kind} step of {names}"
