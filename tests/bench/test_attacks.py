"""Attacks on a small scale, and the verdicts upon them."""

import asyncio
import io
import itertools
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from bench.attacks import conversations, http2, objects
from bench.attacks.__main__ import ATTACKS
from bench.attacks.attack import MIB, Attack, Memory, Observation, Outcome, Question, Victim, Witness, markdown
from bench.attacks.bombs import jpeg_of_scans, png_of_one_colour, tiff_of_one_tile, webp_of_canvas
from bench.attacks.http2 import RawConnection
from bench.attacks.shutdown import Shutdown, as_text
from bench.attacks.target import MemoryWatch, resident_bytes, tree_of
from tests import warm
from tests.reference_fixtures import CHECKOUT

MAX_WAIT_S = 60.0


def strike(victim: Victim, seconds: float, prepared: None) -> Outcome:
    return Outcome()


HELD = Observation(
    Attack("a", "an attack", strike),
    duration_s=5.0,
    witness=Witness((0.01, 0.4), 0, (0.1, 0.2, 0.3), {}),
    memory=Memory(300 * MIB, 700 * MIB, 310 * MIB, was_killed=False),
    end_s=0.5,
    exit_status=0,
)
ASKED = replace(HELD, attack=replace(HELD.attack, question=Question(max_s=2.0)))
PICTURES = replace(HELD, attack=replace(HELD.attack, sends_pictures=True))


def with_witness(observation: Observation, **changes: Any) -> Observation:
    return replace(observation, witness=replace(observation.witness, **changes))


def test_an_attack_without_effects_counts_as_held():
    assert HELD.failures() == []
    row = markdown([HELD]).splitlines()[-1]
    assert row == "| an attack | 0.40 | 100.0% | 0.20 / 0.30 | 400 | 10 | 0.5 | held |"


@pytest.mark.parametrize(
    ("observation", "failure"),
    [
        (with_witness(HELD, health_s=(2.5,)), "health took 2.50 s, more than 2"),
        (with_witness(HELD, health_s=()), "health took 0.00 s, more than 2"),
        (
            replace(with_witness(HELD, health_s=(0.6,)), attack=replace(HELD.attack, is_single_message=True)),
            "health took 0.60 s, more than 0.5",
        ),
        (with_witness(HELD, num_health_failures=3), "health failed 3 times"),
        (with_witness(HELD, failures={"CANCELLED": 1}), "75% answered (1 CANCELLED)"),
        (with_witness(HELD, answers_s=()), "0% answered (nothing was asked)"),
        (replace(HELD, memory=replace(HELD.memory, peak_bytes=900 * MIB)), "grew by 600 MiB, more than 500"),
        (replace(PICTURES, memory=replace(HELD.memory, peak_bytes=1400 * MIB)), "grew by 1100 MiB, more than 1024"),
        (with_witness(PICTURES, answers_s=(7.0,)), "an answer took 7.0 s, more than 6"),
        (with_witness(ASKED, answers_s=(2.5,)), "an answer took 2.5 s, more than 2"),
        (replace(HELD, end_s=None, exit_status=-9), "SIGTERM did not end the process"),
        (replace(HELD, exit_status=1), "ended with status 1"),
        (replace(HELD, memory=replace(HELD.memory, was_killed=True), end_s=None), "killed for its memory"),
        (replace(HELD, attack=replace(HELD.attack, check=lambda outcome, log: ["bad"])), "bad"),
    ],
)
def test_whatever_is_not_as_required_is_named(observation: Observation, failure: str):
    assert observation.failures() == [failure]
    assert observation.as_json()["failures"] == [failure]
    assert failure in markdown([observation])


def test_attacks_have_names_of_their_own_and_can_be_sent_to_processes():
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert [pickle.loads(pickle.dumps(attack)).name for attack in ATTACKS] == names


def test_shutdowns_are_told_in_one_line():
    held, lost = Shutdown({"OK": 5, "UNAVAILABLE": 2}, 1.5, 0), Shutdown({"OK": 1, "CANCELLED": 1}, None, -9)
    assert held.failures() == []
    assert lost.failures() == ["1 CANCELLED", "SIGTERM did not end the process"]
    assert "1 of 2 runs held; 1 CANCELLED, 6 OK, 2 UNAVAILABLE; ended after 1.5, not s" in as_text([held, lost])


@pytest.mark.parametrize(
    ("data", "size", "kind"),
    [
        (jpeg_of_scans(4, 800), (800, 800), "JPEG"),
        (tiff_of_one_tile(700, 64), (64, 64), "TIFF"),
        (png_of_one_colour(900, 700, alpha=True), (900, 700), "PNG"),
        (png_of_one_colour(900, 700, alpha=False), (900, 700), "PNG"),
        (webp_of_canvas(300, 200), (300, 200), "WEBP"),
    ],
)
def test_hostile_pictures_are_pictures(data: bytes, size: tuple[int, int], kind: str):
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert (image.size, image.format) == (size, kind)


def test_hostile_pictures_are_small():
    assert len(jpeg_of_scans(30_000)) < 3 * 10**6
    assert len(tiff_of_one_tile()) < 2.1 * 10**6
    assert len(png_of_one_colour(8_000, 8_000, alpha=True)) < 260_000
    assert len(webp_of_canvas(8_000, 8_000)) < 1_000


async def test_a_raw_connection_calls_as_any_client_does_and_may_leave_out_the_end():
    received: list[int] = []
    size, window = 300_000, 65_535

    async def measure(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        received.append(len(request))
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such bird")
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(measure)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Bird", {"Find": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    headers, message = http2.call_headers("/test.Bird/Find"), http2.grpc_message(bytes(size))
    assert size > 4 * window, "more than may be sent before the server reads"
    try:
        async with asyncio.timeout(MAX_WAIT_S), RawConnection.open("127.0.0.1", port) as connection:
            whole, open_ended = await connection.start(headers), await connection.start(headers)
            assert await connection.send(open_ended, message[:-1], is_last=False)
            assert await connection.send(whole, message, is_last=True)
            assert await connection.status(whole, MAX_WAIT_S) == "5"
            assert connection.message(whole) == "no such bird"
            assert await connection.status(open_ended, 0.0) == "open"
            assert received == [size]
            assert await connection.send(whole, message, is_last=True) is False, "this call is over"
            await connection.send(open_ended, message[-1:], is_last=True)
            assert await connection.status(open_ended, MAX_WAIT_S) == "5"
    finally:
        await server.stop(0)
    assert http2.code_names(Outcome(["5", "5", "open"])) == {"NOT_FOUND": 2, "open": 1}


def test_memory_is_watched_with_that_of_children_and_bounded():
    child = "import sys; data = bytearray(64 * 2**20); print('there', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with warm.as_usual():
        process = subprocess.Popen(
            [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert len(tree_of(process.pid)) == 2
        now_bytes = resident_bytes(process.pid)
        assert now_bytes > 64 * MIB
        watch = MemoryWatch(process.pid, limit_bytes=now_bytes // 2)
        assert process.wait(MAX_WAIT_S) == -9
        watch.stop()
    assert watch.was_killed
    assert watch.peak_bytes > 64 * MIB


def test_a_short_attack_leaves_a_table_and_its_numbers(tmp_path: Path):
    result = tmp_path / "attacks.json"
    command = [sys.executable, "-m", "bench.attacks", "--only", "rapid-reset", "--seconds", "0.5"]
    done = subprocess.run(
        [*command, "--json", str(result)], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    written = json.loads(result.read_text())
    (values,) = written["attacks"]
    row = dict(zip(written["columns"], values, strict=True))
    assert done.returncode == (1 if row["failures"] else 0), done.stderr
    assert row["outcome"]["batches"] > 0
    assert row["num_health"] > 0
    assert row["before_bytes"] > 100 * MIB
    assert row["exit_status"] == 0
    assert "HTTP/2 rapid reset" in done.stdout


def test_conversations_that_attack_have_the_size_that_their_row_names():
    _, sixteen = next(conversations.huge_pictures(b"-"))
    assert sum(part.HasField("image") for message in sixteen.messages for part in message.parts) == 16
    turns = dict(itertools.islice(conversations.many_turns(None), 3))
    assert {kind: len(request.messages) for kind, request in turns.items()} == {
        "too many": 1001,
        "too long": 255,
        "allowed": 255,
    }


def test_requests_about_objects_that_attack_are_as_large_as_they_may_be_or_larger():
    asked = dict(itertools.islice(objects.requests(), 5))
    assert {kind: len(request.objects) for kind, request in asked.items()} == {
        "allowed": 64,
        "left": 64,
        "too many": 50_000,
        "no number": 64,
        "no names": 64,
    }
    assert all(request.ByteSize() < 2**20 for request in asked.values())
    (row,) = (attack for attack in ATTACKS if attack.name == "many-objects")
    assert row.check({"allowed: OK": 1, "left: RESOURCE_EXHAUSTED": 2, "too many: INVALID_ARGUMENT": 3}, "") == []
    assert row.check({"no names: OK": 4, "allowed: INTERNAL": 1}, "") == [
        "4 ended with no names: OK",
        "1 ended with allowed: INTERNAL",
    ]


def test_a_conversation_that_ends_otherwise_than_documented_is_named():
    (row,) = (attack for attack in ATTACKS if attack.name == "chat-roles")
    assert row.check({"allowed: OK": 3, "refused: INVALID_ARGUMENT": 7, "allowed: RESOURCE_EXHAUSTED": 1}, "") == []
    assert row.check({"refused: INVALID_ARGUMENT": 7}, "") == ["none ended with allowed: OK"]
    outcome = {"allowed: OK": 3, "refused: INVALID_ARGUMENT": 7, "refused: INTERNAL": 2}
    assert row.check(outcome, "") == ["2 ended with refused: INTERNAL"]


def test_an_attack_that_there_is_not_is_named():
    command = [sys.executable, "-m", "bench.attacks", "--only", "rapid-reset,kindness"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such attacks: kindness; there are calm, " in done.stderr
