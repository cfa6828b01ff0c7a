"""What has not got on for too long is noticed, however the looks come; and so is the end of the thread."""

import threading
from collections.abc import Callable, Mapping

from kestrel_runtime.engine.watchdog import StallDetector, Watchdog, all_stacks

MAX_WAIT_S = 30.0


def test_an_activity_stalls_when_its_number_stays_the_same_for_the_limit() -> None:
    detector = StallDetector(10.0, max_gap_s=3.0)
    for now in (0.0, 3.0, 6.0, 9.0):
        assert detector.look({"thread": 1, "step": 7}, now) == []
    assert detector.look({"thread": 2, "step": 7}, 10.0) == ["step"]
    assert detector.look({"thread": 2}, 11.0) == []
    assert detector.look({"thread": 2, "step": 7}, 12.0) == []  # it was not there meanwhile, so it begins anew


def test_a_look_that_comes_late_counts_for_little() -> None:
    detector = StallDetector(10.0, max_gap_s=3.0)
    assert detector.look({"thread": 1}, 0.0) == []
    # The machine slept for an hour, and the step with it.
    assert detector.look({"thread": 1}, 3600.0) == []
    assert detector.look({"thread": 1}, 3603.0) == []
    assert detector.look({"thread": 1}, 3606.0) == []
    assert detector.look({"thread": 1}, 3607.0) == ["thread"]


class Worker:
    """A thread at work whose time passes as it is waited for."""

    def __init__(self, progress: Callable[[float], Mapping[str, int]], ends_after_s: float) -> None:
        self.now = 0.0
        self._progress = progress
        self._ends_after_s = ends_after_s

    def join(self, timeout_s: float) -> bool:
        self.now += timeout_s
        return self.now >= self._ends_after_s

    def activities(self) -> Mapping[str, int]:
        return self._progress(self.now)


class Story:
    """What a watchdog did, in order."""

    def __init__(self, worker: Worker, limit_s: float) -> None:
        self.told: list[object] = []
        self.watchdog = Watchdog(
            limit_s,
            join=worker.join,
            activities=worker.activities,
            on_stall=self.told.append,
            on_end=lambda: self.told.append("end"),
            clock=lambda: worker.now,
        )
        self.watchdog.guard()

    def run(self) -> list[object]:
        self.watchdog.start()
        assert self.watchdog.join(MAX_WAIT_S)
        return self.told


def test_the_end_of_the_thread_is_told_once() -> None:
    assert Story(Worker(lambda now: {"thread": int(now)}, 500.0), 60.0).run() == ["end"]


def test_a_stall_is_told_before_the_end_and_at_its_time() -> None:
    worker = Worker(lambda now: {"thread": min(int(now), 100)}, 1e9)
    assert Story(worker, 60.0).run() == [["thread"], "end"]
    assert 160.0 <= worker.now < 165.0


def test_before_steps_are_guarded_the_end_is_noticed_and_no_stall() -> None:
    worker, told = Worker(lambda _: {"thread": 1}, 1000.0), []
    watchdog = Watchdog(
        60.0,
        join=worker.join,
        activities=worker.activities,
        on_stall=told.append,
        on_end=lambda: told.append("end"),
        clock=lambda: worker.now,
    )
    watchdog.start()
    assert watchdog.join(MAX_WAIT_S)
    assert told == ["end"]


def test_time_counts_from_the_moment_when_steps_are_guarded() -> None:
    worker = Worker(lambda _: {"thread": 1}, 1e9)
    watchdog = Watchdog(
        60.0, join=worker.join, activities=worker.activities, on_stall=print, on_end=print, clock=lambda: worker.now
    )
    for _ in range(200):
        worker.now += 1.0
        assert watchdog.look() == []
    watchdog.guard()
    looks = 0
    while not watchdog.look():
        worker.now += 1.0
        looks += 1
    assert looks >= 60


def test_a_watchdog_that_fails_ends_the_engine() -> None:
    def broken(_: float) -> Mapping[str, int]:
        raise ZeroDivisionError

    assert Story(Worker(broken, 1e9), 60.0).run() == ["end"]


def test_stacks_name_each_thread_and_where_it_is() -> None:
    release = threading.Event()

    def blocked_here() -> None:
        release.wait(MAX_WAIT_S)

    thread = threading.Thread(target=blocked_here, name="someone")
    thread.start()
    try:
        stacks = all_stacks()
    finally:
        release.set()
        thread.join()
    assert "thread someone:\n" in stacks
    assert "in test_stacks_name_each_thread_and_where_it_is" in stacks
