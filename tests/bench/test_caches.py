"""The questions about caches, each in small: what hits and what misses. No test judges times."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

from bench.caches import (
    area_under_curve,
    measure,
    new_image,
    other_file,
    padded_image,
    served,
    summary,
    trials,
)
from bench.harness.serving import started_server
from kestrel_client import Client
from tests.bench.small import write_endless_nano
from tests.reference_fixtures import CHECKOUT

HOST_COSTS = """
import asyncio
import json
from bench import caches
from bench.caches import core_costs, engine_costs, server_costs
caches._WARM_UP_REQUESTS = 20
in_core = asyncio.run(core_costs(20, 4, 1, is_streamed=True, num_clients=1))
print(json.dumps([*engine_costs(20, 4, 1), *in_core, *server_costs("cached-whole", 0.3, 4, 1)]))
"""

OPCODES = """
import json
import uvloop
from bench import caches

if __name__ == "__main__":
    caches._WARM_UP_REQUESTS = 64
    print(json.dumps(uvloop.run(caches.core_opcodes(256, 64, is_streamed=True, num_clients=1))))
"""
MOST_OPCODES = {"engine thread": 5400, "front ends": 2600}
"""About a tenth more than the counts with Python 3.11; later versions have fewer."""

NUM_TRIALS = 8
"""Of each kind: enough for images that the victim has asked about and for others."""


def test_a_picture_that_comes_again_is_a_hit_with_the_cache_alone(tmp_path: Path) -> None:
    model, file = write_endless_nano(tmp_path / "endless"), tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "bench.caches",
        "tiers",
        "--model",
        str(model),
        "--variants",
        "prefixes,neither",
    ]
    command += ["--rows", "cached:1", "--rounds", "1", "--seconds", "0.2", "--warm-up", "0.1", "--pictures", "1"]
    answer = subprocess.run(
        [*command, "--processes", "1", "--json", str(file)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(file.read_text())["rows"]["cached:1"]
    assert [row["hit_share"] for row in rows["prefixes"]] == [1.0]
    assert [row["hit_share"] for row in rows["neither"]] == [0.0]
    assert "| cached, 1 at once | prefixes |" in answer.stdout


def test_the_host_costs_of_engine_core_and_server_are_measured_without_the_model() -> None:
    # In a process of its own: it replaces the launching of steps.
    run = subprocess.run(
        (sys.executable, "-c", HOST_COSTS), capture_output=True, text=True, timeout=120, check=True
    )
    engine, core, server = json.loads(run.stdout)
    assert 0 < engine["event loop"] < engine["all"]
    assert 0 < core["event loop"] < core["all"]
    assert core["front ends"] > 0
    assert 0 < server["event loop"] < server["all"]
    assert server["requests/s"] > 0


def test_a_known_picture_takes_no_more_opcodes_than_it_did(tmp_path: Path) -> None:
    program = tmp_path / "count.py"
    program.write_text(OPCODES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(("", *sys.path))}
    run = subprocess.run(
        (sys.executable, str(program)), capture_output=True, text=True, timeout=240, check=True, env=environment
    )
    found = json.loads(run.stdout)
    counts = {thread: sum(by_function.values()) for thread, by_function in found.items()}
    # What the event loop does at intervals counts more often on a slow machine, so that it has no bound here.
    assert counts.keys() == {"engine thread", "event loop", "front ends"}
    assert all(counts[thread] <= most for thread, most in MOST_OPCODES.items()), counts
    # Each of the three tokens of an answer is parsed once, by the engine alone.
    assert any(name.startswith("output_parser.py:OutputParser.consume") for name in found["engine thread"])
    assert not any(name.startswith("output_parser.py") for name in found["front ends"])


def test_stored_images_of_every_size_have_the_same_pixels_and_are_timed() -> None:
    small, large = (padded_image(size) for size in (16_384, 2**20))
    assert (len(small), len(large)) == (16_384, 2**20)
    first, second = (Image.open(io.BytesIO(data)) for data in (small, large))
    assert ImageChops.difference(first, second).getbbox() is None
    with started_server(("--device", "cpu")) as server, Client(server.address, store_from_bytes=None) as client:
        row = measure(client, 16, 2)
    assert len(row.sent_s) == len(row.named_s) == 2
    assert row.as_text().startswith("| 16 KiB | ")


@pytest.mark.parametrize(
    ("known", "unknown", "area"),
    [
        ([1.0, 2.0], [3.0, 4.0], 1.0),
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [2.0, 4.0], 0.75),
        ([1.0], [1.0, 2.0, 2.0, 0.5], (0.5 + 1 + 1 + 0) / 4),
    ],
)
def test_the_area_is_the_share_of_pairs_in_which_the_known_one_is_shorter(
    known: list[float], unknown: list[float], area: float
) -> None:
    assert area_under_curve(known, unknown) == pytest.approx(area)


def test_only_within_one_namespace_an_image_that_the_victim_has_asked_about_is_cached(tmp_path: Path) -> None:
    with served(("--model", str(write_endless_nano(tmp_path / "endless")))) as callers:
        found = trials(callers, num_across=NUM_TRIALS, num_within=NUM_TRIALS, seed=1)
    across, within = (
        summary([item for item in found if item.shares_namespace is shares]) for shares in (False, True)
    )
    assert across["trials"] == within["trials"] == NUM_TRIALS
    assert 0 < across["known"] < NUM_TRIALS
    assert across["hits_known"] == across["hits_unknown"] == within["hits_unknown"] == 0
    assert within["hits_known"] == within["known"] > 0


def test_the_attack_on_crops_sends_another_file_of_the_same_pixels() -> None:
    image = new_image(np.random.default_rng(3))
    other = other_file(image)
    assert other != image
    assert Image.open(io.BytesIO(other)).tobytes() == Image.open(io.BytesIO(image)).tobytes()
