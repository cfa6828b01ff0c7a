"""Which sequences of a step get a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel_runtime.api.errors import ConstraintFailed
from kestrel_runtime.constraints.masks import MaskRequest, step_masks
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.sequences import new_sequence


class Maker:
    """Makes the matcher itself the mask, or fails."""

    def __init__(self) -> None:
        self.generated: list[list[Token]] = []

    def masks(self, requests: Sequence[MaskRequest]) -> list[Any]:
        self.generated += [list(request.generated) for request in requests]
        return [ConstraintFailed() if item.matcher == "fails" else item.matcher for item in requests]


def running(matcher: Any, num_generated: int = 0) -> Any:
    made = new_sequence(3)
    made.matcher = matcher
    made.tokens += [Token(90 + number) for number in range(num_generated)]
    return made


def test_only_sequences_with_a_constraint_that_are_still_here_get_one() -> None:
    gone = running("gone")
    gone.state = SequenceState.FINISHED
    batch = Batch.of_decode([running(None), running("mine", 2), gone, running("fails"), running("yours")])
    maker = Maker()
    masks, failed = step_masks(batch, maker.masks)
    assert masks == [None, "mine", None, None, "yours"]
    assert failed == [batch.decode[3]]
    assert maker.generated == [[Token(90), Token(91)], [], []]


def test_without_a_constraint_nothing_is_made() -> None:
    assert step_masks(Batch.of_decode([running(None)]), None) == ([None], [])
