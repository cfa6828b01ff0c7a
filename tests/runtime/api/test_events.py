import pickle

import pytest

from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    Finished,
    FinishReason,
    Grounding,
    Location,
    PointOutput,
    QueryOutput,
    Reasoning,
    SegmentMask,
    SegmentOutput,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    Usage,
)

BOX = Box(0.0, 0.25, 0.5, 1.0)
USAGE = Usage(num_input_tokens=740, num_image_tokens=729)
EVENTS = [
    Started(USAGE),
    TextDelta("word", TextChannel.ANSWER, 0, 1),
    *(
        Finished(output, FinishReason.STOP, USAGE, Timing(0.0, 0.0, 0.0, 0.0, 0.0))
        for output in (
            QueryOutput("a", Reasoning("b", (Grounding(0, 1, (Location(0.5, 0.5),)),))),
            CaptionOutput("a"),
            PointOutput((Location(0.5, 0.5),)),
            DetectOutput((BOX,)),
            SegmentOutput((SegmentMask("M 0 0", BOX),)),
        )
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_a_value_that_may_cross_threads(event):
    twin = pickle.loads(pickle.dumps(event))
    assert twin is not event
    assert hash(event) == hash(twin)
    assert event == twin
    with pytest.raises(AttributeError):
        setattr(event, type(event).__match_args__[0], None)


def test_nothing_has_been_generated_when_a_request_starts():
    assert USAGE.num_output_tokens == 0
