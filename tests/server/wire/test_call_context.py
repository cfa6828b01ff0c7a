"""What a call knows of itself: its name and its time."""

from __future__ import annotations

import pytest

from kestrel_grpc.wire.call_context import CallContext

METHOD = "kestrel.v1.VisionService/Query"


def test_a_call_without_a_deadline_is_never_late():
    call = CallContext((), None, METHOD)
    assert (call.is_late, call.remaining_s) == (False, None)


def test_a_call_is_not_late_while_its_deadline_is_far():
    call = CallContext((), 3600.0, METHOD)
    assert not call.is_late
    assert call.remaining_s == pytest.approx(3600.0, abs=60.0)


@pytest.mark.parametrize(
    ("seconds_before", "is_late"),
    [(-1.0, True), (0.0, True), (0.015, True), (0.9, True), (1.1, False)],
    ids=["after", "at", "on its way", "rounded up by gRPC", "before"],
)
def test_a_call_is_late_as_soon_as_its_caller_may_find_it_so(seconds_before, is_late, monkeypatch):
    """A caller who waits 99.01 s writes that it waits 99.1 s, and hangs up when its own time is over."""
    now_s = 1000.0
    monkeypatch.setattr("kestrel_grpc.wire.call_context.time.monotonic", lambda: now_s)
    call = CallContext((), 100.0, METHOD)
    now_s += 100.0 - seconds_before
    assert call.is_late is is_late


def test_a_late_call_has_no_time_remaining():
    call = CallContext((), 0.0, METHOD)
    assert call.remaining_s == 0.0


def test_a_fit_name_is_kept_and_an_unfit_one_replaced():
    assert CallContext((("x-request-id", "a.b_C-1"),), None, METHOD).request_id == "a.b_C-1"
    assert CallContext((("x-request-id", "two words"),), None, METHOD).request_id != "two words"
