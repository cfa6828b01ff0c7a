"""The masks under which a step samples. Knows batches and matchers, no device."""

from __future__ import annotations

from typing import Any

from kestrel_runtime.interfaces.token_matcher import MaskMaker, MaskRequest
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.sequence import Sequence, SequenceState


def step_masks(batch: Batch, maker: MaskMaker | None) -> tuple[list[Any], list[Sequence]]:
    """A mask for each of `batch.sampled`, None for every token, and the sequences whose constraint has failed.

    The tokens of all steps before must be known.
    """
    asked = [
        (place, MaskRequest(sequence.matcher, sequence.generated))
        for place, sequence in enumerate(batch.sampled)
        # One that has ended meanwhile is still in the step; its token is dropped.
        if sequence.matcher is not None and sequence.state is not SequenceState.FINISHED
    ]
    masks: list[Any] = [None] * len(batch.sampled)
    failed: list[Sequence] = []
    if asked:
        assert maker is not None, "an engine that takes constraints has one"
        for (place, _), mask in zip(asked, maker.masks([request for _, request in asked]), strict=True):
            if isinstance(mask, Exception):
                failed.append(batch.sampled[place])
            else:
                masks[place] = mask
    return masks, failed
