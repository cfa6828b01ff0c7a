"""A soak of a few seconds, and what a longer one would complain of."""

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.harness.mixed_traffic import MixedTraffic, Tally
from bench.harness.serving import Holdings, ProcessVitals, Vitals
from bench.soak import NUM_BURST_CALLS, Look, Rest, Soak, warm_up
from kestrel_client import AsyncClient
from tests.reference_fixtures import CHECKOUT

MIB = 2**20
SUPERVISOR, CORE = ProcessVitals(1, 60 * MIB, 11, 8, 1.0), ProcessVitals(2, 500 * MIB, 20, 18, 1.0)
VITALS = Vitals({"supervisor": SUPERVISOR, "core 0": CORE}, num_used_pages=0, num_running=0, num_waiting=0)
REST = Rest(VITALS, Holdings(3, Counter({"builtins.dict": 9})))


def with_core(**changes: int) -> Vitals:
    return replace(VITALS, processes={**VITALS.processes, "core 0": replace(CORE, **changes)})


def half_an_hour(mib_per_hour: float = 0.0) -> Soak:
    looks = (
        Look(5.0 * number, with_core(rss_bytes=round((500 + mib_per_hour * number / 720) * MIB)))
        for number in range(360)
    )
    return Soak({}, 1800.0, 60.0, REST, REST, tuple(looks), Tally(), (), 0)


def with_error(soak: Soak) -> Soak:
    tally = Tally()
    tally.add_error("Point", ValueError("nothing there"))
    return replace(soak, tally=tally)


def after(vitals: Vitals) -> Soak:
    return replace(half_an_hour(), after=replace(REST, vitals=vitals))


def test_a_server_that_stays_as_it_is_gives_no_cause_for_complaint():
    soak = half_an_hour()
    assert soak.complaints() == []
    assert "memory of the core 0 over the second half: +0.00 ± 0.00 MiB per hour" in soak.as_text()


@pytest.mark.parametrize(
    ("soak", "complaint"),
    [
        (half_an_hour(mib_per_hour=20.0), "memory of the core 0 rises by 20.0 MiB per hour"),
        (with_error(half_an_hour()), "1 errors that were not injected"),
        (after(replace(VITALS, num_used_pages=2)), "2 pages in use"),
        (after(with_core(num_descriptors=21)), "descriptors of the core 0: 20 after the warm-up, 21 in the end"),
        (after(with_core(num_threads=19)), "threads of the core 0: 18 after the warm-up, 19 in the end"),
        (
            after(with_core(pid=3)),
            "other processes in the end: {'supervisor': 1, 'core 0': 3} after {'supervisor': 1, 'core 0': 2}",
        ),
        (
            replace(half_an_hour(), after=replace(REST, holdings=Holdings(4, Counter()))),
            "tasks: 3 after the warm-up, 4 in the end",
        ),
        (replace(half_an_hour(), troubles=("ERROR",)), "1 warnings or errors in the server's log"),
        (replace(half_an_hour(), exit_status=1), "the server ended with status 1"),
    ],
)
def test_whatever_is_left_behind_is_named(soak: Soak, complaint: str):
    assert soak.complaints() == [complaint]
    assert complaint in soak.as_text()


def test_a_short_soak_allows_what_pools_make_on_demand_and_not_what_each_call_leaves():
    short = replace(half_an_hour(), duration_s=3.0)
    for kind, base in (("num_threads", 18), ("num_descriptors", 20)):
        few = replace(short, after=replace(REST, vitals=with_core(**{kind: base + 8})))
        assert few.complaints() == []
        many = replace(short, after=replace(REST, vitals=with_core(**{kind: base + 9})))
        assert len(many.complaints()) == 1
    task = replace(short, after=replace(REST, holdings=Holdings(4, Counter())))
    assert task.complaints() == ["tasks: 3 after the warm-up, 4 in the end"]


class TwoFrontends:
    """A server whose bursts reach these front ends, one after the other."""

    def __init__(self, *reached: str) -> None:
        self.left = list(reached)
        self.counts = Counter[str]()

    def processes(self) -> dict[str, int]:
        return {"supervisor": 1, "core 0": 2, "frontend 0": 3, "frontend 1": 4}

    def calls(self) -> Counter[str]:
        return self.counts

    async def burst(self, num_calls: int) -> None:
        self.counts[self.left.pop(0)] += num_calls


async def test_the_warm_up_ends_once_a_burst_has_reached_every_front_end():
    server = TwoFrontends("frontend 1", "frontend 1", "frontend 0", "frontend 1")
    await warm_up(cast(Any, server), cast(Any, server))
    assert server.counts == {"frontend 0": NUM_BURST_CALLS, "frontend 1": 2 * NUM_BURST_CALLS}


async def test_a_warm_up_that_does_not_reach_a_front_end_is_an_error():
    server = TwoFrontends(*["frontend 1"] * 99)
    with pytest.raises(RuntimeError, match="has not reached every front end"):
        await warm_up(cast(Any, server), cast(Any, server))


async def test_each_burst_asks_about_pictures_that_no_burst_has_asked_about(monkeypatch: pytest.MonkeyPatch):
    asked: list[set[bytes]] = []

    async def note(self: Any, client: AsyncClient, chance: random.Random, name: str) -> None:
        asked[-1].add(self._picture(chance))

    monkeypatch.setattr(MixedTraffic, "_ask", note)
    traffic = MixedTraffic("127.0.0.1:1")
    for _ in range(2):
        asked.append(set())
        await traffic.burst(NUM_BURST_CALLS)
    assert asked[1] - asked[0]


def test_a_few_seconds_leave_nothing_behind(tmp_path: Path):
    command = (sys.executable, "-m", "bench.soak", "--minutes", "0.05", "--callers", "3", "--every", "0.3")
    done = subprocess.run(
        (*command, "--json", str(tmp_path / "soak.json")), cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["complaints"] == []
    assert sum(found["answered"].values()) >= 32
    first, last = (found["looks"][number]["processes"]["server"]["cpu_s"] for number in (0, -1))
    assert last > first > 0
    assert found["after"]["num_tasks"] > 0
    assert (tmp_path / "soak-memory.svg").read_text().startswith("<svg")
