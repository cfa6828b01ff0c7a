"""A server over a device that only takes time."""

import re
import signal
import subprocess
import sys

import pytest

from bench.harness.workload import chart
from bench.timed_server import Cost, Device
from kestrel_client import Client
from tests.golden import CHECKOUT

COST = Cost(device_ms=1.0, each_ms=2.0, launch_ms=0.0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [100.0]
    monkeypatch.setattr("bench.timed_server.time.perf_counter", lambda: now[0])
    return now


def test_work_waits_for_the_work_before_it(clock):
    device = Device(slower=1.0)
    assert device.take(COST, 2) == pytest.approx(100.005)
    assert device.take(COST, 0.5) == pytest.approx(100.007)
    assert device.idle_share == pytest.approx(0.0, abs=1e-9)


def test_a_device_without_work_is_idle(clock):
    device = Device(slower=2.0)
    device.take(COST, 2)
    clock[0] += 0.030
    assert device.take(COST, 2) == pytest.approx(100.040)
    assert device.idle_share == pytest.approx(0.5)


def test_a_device_that_had_no_work_at_all_was_not_idle():
    assert Device(slower=1.0).idle_share == 0.0


def test_it_answers_as_the_server_does_and_tells_how_idle_the_device_was():
    command = (sys.executable, "-m", "bench.timed_server", "--slower", "0.1", "--", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split(" on ")[1].split()[0]
            with Client(address) as client:
                answer = client.query(chart(1), "What is shown here?", max_tokens=5).result()
                places = client.point(chart(2), "bar")
        finally:
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (len(answer.answer), answer.usage.output_token_count) == (5, 5)
    assert not places.points
    assert process.returncode == 0
    assert re.fullmatch(r"the device was idle for \d+\.\d% of the time\n", output)
