"""What becomes of requests when the processes of cores end: submitted again, ended, or refused."""

import pytest

from kestrel_grpc.multiprocess.engine_channel import core_deaths
from kestrel_grpc.multiprocess.engine_channel.core_deaths import CoreDeaths
from kestrel_grpc.multiprocess.protocol.messages import Isolate, Quarantine
from kestrel_runtime.api.errors import EngineUnavailable, RequestRefused

POISON, OTHER = "query-1", "query-2"


def fate(deaths: CoreDeaths, fingerprint: str, *, has_events: bool = False) -> str:
    error = deaths.error_of(fingerprint, has_events=has_events)
    return "again" if error is None else type(error).__name__


def noted(deaths: CoreDeaths) -> dict[str, set[str]]:
    return {type(note).__name__: set(note.fingerprints) for note in deaths.notes()}


@pytest.mark.parametrize(("is_fault", "num_ends"), [(True, 2), (False, 4)])
def test_a_request_that_was_alone_in_flight_is_refused_after_two_faults_or_four_kills(
    is_fault: bool, num_ends: int
) -> None:
    deaths = CoreDeaths()
    for number in range(num_ends):
        assert fate(deaths, POISON) == "again"
        deaths.record([POISON] if number else [POISON, OTHER], is_fault=is_fault)
        deaths.completed_alone(OTHER)
    assert (fate(deaths, POISON), fate(deaths, OTHER)) == (RequestRefused.__name__, "again")
    assert fate(deaths, POISON, has_events=True) == RequestRefused.__name__
    assert noted(deaths) == {Isolate.__name__: {POISON}, Quarantine.__name__: {POISON}}


def test_requests_in_flight_together_run_alone_and_are_submitted_again_unless_they_have_begun() -> None:
    deaths = CoreDeaths()
    deaths.record([POISON, OTHER], is_fault=True)
    assert noted(deaths) == {Isolate.__name__: {POISON, OTHER}}
    assert [fate(deaths, OTHER, has_events=begun) for begun in (False, True)] == [
        "again",
        EngineUnavailable.__name__,
    ]


def test_a_request_is_isolated_after_its_second_kill() -> None:
    deaths = CoreDeaths()
    deaths.record([OTHER], is_fault=False)
    assert noted(deaths) == {}
    deaths.record([OTHER], is_fault=False)
    assert noted(deaths) == {Isolate.__name__: {OTHER}}


def test_requests_that_are_never_alone_in_flight_are_never_refused() -> None:
    deaths = CoreDeaths()
    for _ in range(9):
        deaths.record([POISON, OTHER], is_fault=True)
    assert (fate(deaths, POISON), fate(deaths, OTHER)) == ("again", "again")


def test_a_front_end_knows_its_request_by_a_fingerprint_without_the_adapter() -> None:
    deaths = CoreDeaths()
    for _ in range(2):
        deaths.record([f"{POISON}-adapter"], is_fault=True)
    assert fate(deaths, POISON) == RequestRefused.__name__


@pytest.mark.parametrize("alone", [True, False])
def test_the_count_of_a_request_that_completes_is_forgotten(alone: bool) -> None:
    deaths = CoreDeaths()
    for _ in range(9):
        deaths.record([OTHER], is_fault=True)
        if alone:
            deaths.completed_alone(OTHER)
        else:
            deaths.completed(OTHER)
        assert not deaths.has_counts
    assert (fate(deaths, OTHER), noted(deaths)) == ("again", {})


def test_counts_are_forgotten_after_a_while_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = CoreDeaths()
    now = 1000.0
    monkeypatch.setattr(core_deaths.time, "monotonic", lambda: now)
    deaths.record([POISON], is_fault=True)
    now += 601.0
    deaths.record([POISON], is_fault=True)
    assert fate(deaths, POISON) == "again"
    deaths.record([f"query-{number}" for number in range(100, 900)], is_fault=True)
    assert len(noted(deaths)[Isolate.__name__]) == 256
