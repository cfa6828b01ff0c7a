import threading

import pytest
import torch

from kestrel_runtime.lane import Lane
from kestrel_runtime.recording import Recorder, Recordings

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Work:
    """Doubles what stands in `source`, and counts how often it was really run."""

    def __init__(self):
        self.source = torch.zeros(3, device="cuda")
        self.num_runs = 0

    def __call__(self):
        self.num_runs += 1
        return self.source * 2


def new_recorder():
    return Recorder(Lane(torch.device("cuda")))


def new_recordings():
    return Recordings("works", new_recorder())


@needs_cuda
def test_a_replay_does_the_work_again_on_what_stands_there_now():
    work = Work()
    recording = new_recorder().record(work, torch.cuda.graph_pool_handle())
    work.source += 4
    assert recording.replayed().tolist() == [8, 8, 8]


@needs_cuda
def test_rare_work_is_run_and_work_that_comes_again_is_replayed():
    recordings, rare, frequent = new_recordings(), Work(), Work()
    results = []
    for number in range(5):
        frequent.source.fill_(number)
        results.append(recordings.run("frequent", frequent, at_once=False))
    assert [result.tolist() for result in results] == [[2.0 * number] * 3 for number in range(5)]
    assert frequent.num_runs == 2  # the second time for the recording
    recordings.run("rare", rare, at_once=False)
    assert rare.num_runs == 1


@needs_cuda
def test_what_finds_no_memory_runs_as_it_is():
    recordings, work = new_recordings(), Work()

    def too_large():
        result = work()
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**50, device="cuda")
        return result

    for _ in range(5):
        assert recordings.run("large", too_large, at_once=False).tolist() == [0, 0, 0]
    assert work.num_runs == 6  # one of them for a recording that came to nothing


@needs_cuda
def test_recordings_do_not_grow_without_end():
    recordings, late = new_recordings(), Work()
    works = [Work() for _ in range(256)]
    for _ in range(2):
        for number, work in enumerate(works):
            recordings.run(number, work, at_once=False)
    for _ in range(3):
        recordings.run("late", late, at_once=False)
    assert late.num_runs == 3


@needs_cuda
def test_what_others_launch_meanwhile_is_not_recorded():
    recordings, work, others = new_recordings(), Work(), torch.zeros(1, device="cuda")
    aside = torch.cuda.Stream()

    def launch_aside():
        with torch.cuda.stream(aside):
            others.add_(1)

    def disturbed():
        thread = threading.Thread(target=launch_aside)
        thread.start()
        thread.join()
        return work()

    for _ in range(4):
        recordings.run("disturbed", disturbed, at_once=False)
    torch.cuda.synchronize()
    assert others.item() == work.num_runs == 2
