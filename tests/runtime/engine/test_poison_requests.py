"""Equal work has an equal fingerprint, and only so many are kept."""

import pytest

from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import (
    Caption,
    Detect,
    Point,
    Priority,
    Query,
    Request,
    RequestOptions,
    SamplingParams,
)
from kestrel_runtime.engine.poison_requests import LIFETIME_S, PoisonRequests, fingerprint_of

QUERY = Query("What?", b"image")


def test_how_a_request_is_handled_does_not_change_its_fingerprint() -> None:
    options = RequestOptions(max_queue_s=3.0, priority=Priority.BATCH)
    assert fingerprint_of(Query("What?", b"image", options=options)) == fingerprint_of(QUERY)


@pytest.mark.parametrize(
    "other",
    [
        Query("What", b"image"),
        Query("What?", b"imagE"),
        Query("What?"),
        Query("What?", b"image", reasoning=True),
        Query("What?", b"image", sampling=SamplingParams(max_tokens=3)),
        Point("What?", b"image"),
        Detect("What?", b"image"),
        Caption(b"image"),
        Query("What?", RawImage.packed(b"image", 5, 1, PixelFormat.GRAY8)),
    ],
)
def test_other_work_has_another_fingerprint(other: Request) -> None:
    assert fingerprint_of(other) != fingerprint_of(QUERY)


def test_raw_images_of_another_shape_are_other_work() -> None:
    images = [RawImage.packed(b"images", *size, PixelFormat.GRAY8) for size in ((6, 1), (3, 2), (3, 2))]
    one, other, same = (fingerprint_of(Query("What?", image)) for image in images)
    assert one != other == same


def test_a_fingerprint_names_the_skill_and_not_the_text() -> None:
    assert fingerprint_of(QUERY).startswith("query-")
    assert "What" not in fingerprint_of(QUERY)


def test_the_oldest_of_too_many_are_forgotten() -> None:
    poison_requests = PoisonRequests()
    for number in range(300):
        poison_requests.quarantine(str(number))
        poison_requests.quarantine("again and again")
    assert "0" not in poison_requests
    assert "299" in poison_requests
    assert "again and again" in poison_requests


def test_a_fingerprint_is_refused_for_an_hour_and_then_tried_again() -> None:
    now = 1000.0
    poison_requests = PoisonRequests(clock=lambda: now)
    poison_requests.quarantine("query-1")
    now += LIFETIME_S - 1
    assert "query-1" in poison_requests
    now += 1
    assert "query-1" not in poison_requests
    poison_requests.quarantine("query-1")  # it has failed again
    assert "query-1" in poison_requests
    assert LIFETIME_S == 3600.0


def test_learning_a_fingerprint_again_begins_its_hour_anew() -> None:
    now = 0.0
    poison_requests = PoisonRequests(clock=lambda: now)
    poison_requests.quarantine("query-1")
    now = LIFETIME_S / 2
    poison_requests.quarantine("query-1")
    now = LIFETIME_S * 1.2
    assert "query-1" in poison_requests


def test_a_restart_clears_all_but_those_that_it_raises_no_doubt_about() -> None:
    poison_requests = PoisonRequests()
    poison_requests.quarantine("query-1")
    poison_requests.quarantine("query-2", survives_restart=True)
    poison_requests.forget_learned_before_restart()
    assert "query-1" not in poison_requests
    assert "query-2" in poison_requests
