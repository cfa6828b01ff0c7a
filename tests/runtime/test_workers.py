import threading

import pytest

from kestrel_runtime.workers import Workers

MAX_WAIT_S = 30


@pytest.fixture
def workers():
    workers = Workers(1, "test")
    yield workers
    workers.close()


class Gate:
    """Keeps the only thread busy until it is opened."""

    def __init__(self, workers):
        self._is_open = threading.Event()
        self._is_met = threading.Event()
        self.done = workers.submit(self._wait, -1.0)
        assert self._is_met.wait(MAX_WAIT_S)

    def open(self):
        self._is_open.set()

    def _wait(self):
        self._is_met.set()
        assert self._is_open.wait(MAX_WAIT_S)


def test_the_most_urgent_goes_first_and_of_equals_who_came_first(workers):
    gate, order = Gate(workers), []
    jobs = [(2.0, "late"), (1.0, "soon"), (2.0, "later"), (0.5, "now")]
    futures = [workers.submit(lambda name=name: order.append(name), urgency) for urgency, name in jobs]
    gate.open()
    for future in futures:
        future.result(MAX_WAIT_S)
    assert order == ["now", "soon", "late", "later"]


def test_a_result_or_an_error_comes_back(workers):
    assert workers.submit(lambda: 7, 0.0).result(MAX_WAIT_S) == 7
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 / 0, 0.0).result(MAX_WAIT_S)


def test_what_was_cancelled_is_not_done_and_holds_up_nobody(workers):
    gate, done = Gate(workers), []
    unwanted = workers.submit(lambda: done.append("unwanted"), 0.0)
    wanted = workers.submit(lambda: done.append("wanted"), 1.0)
    assert unwanted.cancel()
    gate.open()
    wanted.result(MAX_WAIT_S)
    assert done == ["wanted"]


def test_closing_cancels_what_has_not_begun_and_waits_for_the_rest():
    workers = Workers(1, "test")
    gate = Gate(workers)
    waiting = workers.submit(lambda: None, 0.0)
    closing = threading.Thread(target=workers.close)
    closing.start()
    given_up = threading.Event()
    waiting.add_done_callback(lambda _: given_up.set())
    assert given_up.wait(MAX_WAIT_S)
    assert waiting.cancelled()
    assert not gate.done.done()
    gate.open()
    closing.join(MAX_WAIT_S)
    assert gate.done.done()
    with pytest.raises(RuntimeError):
        workers.submit(lambda: None, 0.0)
