"""A server over a device that only takes time."""

import re
import signal
import subprocess
import sys

import pytest

from bench.harness.workload import chart
from bench.timed_server import Cost, Device
from kestrel_client import Client
from tests.reference_fixtures import CHECKOUT

COST = Cost(device_ms=1.0, each_ms=2.0, launch_ms=0.0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so, launches included."""
    monkeypatch.setattr(Device, "_launch", lambda device, cost: None)
    now = [100.0]
    monkeypatch.setattr("bench.timed_server.time.perf_counter", lambda: now[0])
    return now


def test_prompts_wait_for_those_before_them(clock):
    device = Device(slower=1.0)
    assert device.take_in(COST, 2).ends == pytest.approx(100.005)
    assert device.take_in(COST, 0.5).ends == pytest.approx(100.007)
    assert device.idle_share == pytest.approx(0.0, abs=1e-9)


def test_decoding_beside_prompts_takes_longer_and_puts_them_off(clock):
    device = Device(slower=1.0)
    alone = device.decode(10).ends - 100.0
    clock[0] += 1.0
    prompts = device.take_in(COST, 50)
    beside = device.decode(10)
    assert alone < 0.0043
    assert beside.ends - 101.0 == pytest.approx(0.0043)
    assert prompts.ends - 101.101 == pytest.approx(0.00067)


def test_decoding_waits_for_the_prompts_that_it_is_to_follow(clock):
    device = Device(slower=1.0)
    prompts = device.take_in(COST, 50)
    ends = prompts.ends
    assert device.decode(10, after=prompts).ends > ends
    assert prompts.ends == ends


def test_a_device_without_work_is_idle(clock):
    device = Device(slower=2.0)
    device.take_in(COST, 2)
    clock[0] += 0.030
    assert device.take_in(COST, 2).ends == pytest.approx(100.040)
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
