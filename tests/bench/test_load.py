"""Load processes on a server without a model."""

from collections.abc import Iterator

import grpc
import pytest

from bench.harness.empty_server import empty_server
from bench.harness.load import LoadProcesses, Questions
from bench.harness.workload import WORKLOADS
from kestrel_grpc.cli.bench.calls import Target
from kestrel_grpc.cli.bench.processes import EndedEarly, Recording, Tally
from kestrel_grpc.cli.bench.processes import LoadProcesses as Processes


@pytest.fixture(scope="module")
def load() -> Iterator[LoadProcesses]:
    with empty_server() as address, LoadProcesses(address, 2, num_pictures=2) as processes:
        yield processes


def recorded(load: LoadProcesses, num_callers: int) -> Recording:
    """Records over a longer window where the machine was too busy for a request in a shorter one."""
    windows_s = (0.2, 2.0, 20.0, 60.0)
    recordings = (
        load.closed(WORKLOADS["direct"], num_callers, duration_s=window_s, warm_up_s=5.0) for window_s in windows_s
    )
    return next(recording for recording in recordings if recording.samples)


def test_a_closed_loop_records_every_piece_of_every_answer(load: LoadProcesses):
    recording = recorded(load, 3)
    assert {sample.error for sample in recording.samples} == {""}
    assert {sample.num_tokens for sample in recording.samples} == {3}
    assert {len(sample.arrivals) for sample in recording.samples} == {3}
    assert all(
        sample.started <= sample.arrivals[0] <= sample.arrivals[-1] <= sample.ended for sample in recording.samples
    )
    assert 0 < recording.busiest_client < 2


def test_fewer_requests_than_processes_are_as_many_as_asked(load: LoadProcesses):
    recording = recorded(load, 1)
    assert most_at_once(recording) == 1


def test_an_open_loop_sends_at_its_rate_whatever_the_answers(load: LoadProcesses):
    recording = load.open(WORKLOADS["text"], 60.0, duration_s=0.5, wait_limit_s=10.0)
    window = recording.window
    assert all(window.start <= sample.started < window.end for sample in recording.samples)
    # The moments follow from the processes' numbers, so their count is always the same.
    again = load.open(WORKLOADS["text"], 60.0, duration_s=0.5, wait_limit_s=10.0)
    assert len(recording.samples) == len(again.samples) == pytest.approx(30, abs=12)


def test_a_closed_loop_that_is_ended_early_has_the_window_until_then():
    tallies: list[Tally] = []

    def is_ended() -> bool:
        return bool(tallies) and not tallies[-1].is_warm_up and tallies[-1].num_answered > 2

    with (
        empty_server() as address,
        Processes(Target("grpc", address), Questions(1, (), 1), 1, watch=tallies.append, is_ended=is_ended) as load,
    ):
        recording = load.closed(WORKLOADS["direct"], 2, duration_s=86_400.0, warm_up_s=60.0)
        with pytest.raises(EndedEarly):
            load.closed(WORKLOADS["direct"], 2, duration_s=86_400.0, warm_up_s=60.0)
    assert recording.is_partial
    assert 0.0 < recording.window.duration_s < 86_400.0
    assert {sample.error for sample in recording.samples} == {""}
    assert all(sample.started < recording.window.end for sample in recording.samples)


def test_a_server_that_is_gone_is_an_error_of_every_request(unused_address: str):
    with LoadProcesses(unused_address, 1, num_pictures=1) as load:
        windows_s = (0.1, 1.0, 10.0, 60.0)  # longer where the machine was too busy for a request in a shorter one
        recordings = (load.closed(WORKLOADS["text"], 2, duration_s=item, warm_up_s=5.0) for item in windows_s)
        recording = next(recording for recording in recordings if recording.samples)
    assert {sample.error for sample in recording.samples} == {grpc.StatusCode.UNAVAILABLE.name}


@pytest.fixture
def unused_address() -> str:
    with empty_server() as address:
        pass
    return address


def most_at_once(recording: Recording) -> int:
    moments = [(sample.started, 1) for sample in recording.samples]
    moments += [(sample.ended, -1) for sample in recording.samples]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most
