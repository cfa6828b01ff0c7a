"""One attack from start to end: server, witnesses, attackers, rest, SIGTERM."""

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import kestrel_runtime
from bench.attacks.attack import MAX_END_S, MIB, Attack, Memory, Observation, Outcome, Victim, nothing_to_prepare
from bench.attacks.target import MemoryWatch, Target, resident_bytes, started_target
from bench.attacks.witnesses import witnesses

_ADAPTER = Path(kestrel_runtime.__file__).parent / "nano" / "adapters" / "gold"
RECOVERY_S = 2.0
"""For so long others are watched when the attackers have gone."""
REST_S = 35.0
"""A server that rests gives back memory every 30 seconds."""
_SETTLED_BYTES = 32 * MIB
_PREPARE_TIMEOUT_S = 120.0
_GRACE_S = 60.0


def carry_out(attack: Attack, seconds: float, limit_bytes: int, server_options: Sequence[str] = ()) -> Observation:
    """Attack a server of its own for so long; it is killed where it grows over the limit."""
    with tempfile.TemporaryDirectory() as folder:
        options = (*attack.server_options, *_adapter_options(Path(folder), attack.num_adapters), *server_options)
        with started_target(
            Path(folder), options, attack.num_descriptors, attacker_is_operator=attack.is_by_operator
        ) as target:
            return _attack(attack, seconds, limit_bytes, target)


def _adapter_options(folder: Path, num_adapters: int) -> tuple[str, ...]:
    """Copies of the adapter of the built-in model, and the option that names their folder."""
    if not num_adapters:
        return ()
    for number in range(num_adapters):
        shutil.copytree(_ADAPTER, folder / "adapters" / str(number))
    return ("--adapters", str(folder / "adapters"))


def _attack(attack: Attack, seconds: float, limit_bytes: int, target: Target) -> Observation:
    host, port = target.address.rsplit(":", 1)
    victim = Victim(host, int(port), target.tokens["mallory"], target.http_port)
    usual_per_s = _beside_busy_processes(attack, seconds, target, victim) if attack.leaves_half else None
    with witnesses(target.address, target.tokens["alice"], attack) as others:
        before_bytes = resident_bytes(target.pid)
        watch = MemoryWatch(target.pid, limit_bytes)
        logged_before = target.log_bytes()
        outcome, duration_s = _strike(attack, victim, seconds, others.go)
        log_bytes = target.log_bytes() - logged_before
        if not attack.is_followed_by_sigterm and not attack.leaves_half:
            time.sleep(RECOVERY_S)
        witness = others.stop()
    if attack.is_followed_by_sigterm:
        after_bytes = resident_bytes(target.pid)
    else:
        after_bytes = _at_rest(target.pid, before_bytes)
    watch.stop()
    memory = Memory(before_bytes, watch.peak_bytes, after_bytes, watch.was_killed)
    target.terminate(2 * MAX_END_S)
    return Observation(
        attack,
        duration_s,
        witness,
        memory,
        target.end_s,
        target.exit_status,
        outcome,
        target.log(),
        log_bytes,
        usual_per_s,
    )


def _beside_busy_processes(attack: Attack, seconds: float, target: Target, victim: Victim) -> float:
    """How many answers a second others get while as many processes as attack only compute."""
    busy = replace(attack, name="busy", strike=_compute, prepare=nothing_to_prepare)
    with witnesses(target.address, target.tokens["alice"], busy) as others:
        _, duration_s = _strike(busy, victim, seconds, others.go)
        return len(others.stop().answers_s) / duration_s


def _compute(victim: Victim, seconds: float, prepared: None) -> Outcome:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return Outcome()


def _strike(attack: Attack, victim: Victim, seconds: float, go: Any) -> tuple[Outcome, float]:
    """Have the attackers prepare, then attack at once. Those that do not end by themselves are killed."""
    context = multiprocessing.get_context("spawn")
    begin = context.Event()
    pipes: list[Connection] = []
    processes: list[Any] = []
    total = Outcome()
    try:
        for _ in range(attack.num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_attacker, args=(attack, victim, seconds, begin, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            if not pipe.poll(_PREPARE_TIMEOUT_S) or pipe.recv() != "ready":
                raise RuntimeError(f"{attack.name}: an attacker does not start")
        go()
        begin.set()
        began = time.monotonic()
        for pipe in pipes:
            left_s = began + seconds + _GRACE_S - time.monotonic()
            try:
                total += pipe.recv() if pipe.poll(max(0.0, left_s)) else Outcome({"attacker killed": 1})
            except EOFError:
                total += Outcome({"attacker died": 1})
        return total, time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.join()


def _attacker(attack: Attack, victim: Victim, seconds: float, begin: Event, pipe: Connection) -> None:
    prepared = attack.prepare()
    pipe.send("ready")
    begin.wait()
    pipe.send(attack.strike(victim, seconds, prepared))


def _at_rest(pid: int, before_bytes: int) -> int:
    """Resident bytes once they are about what they were, or after a while, whatever they are."""
    deadline = time.monotonic() + REST_S
    while (now_bytes := resident_bytes(pid)) > before_bytes + _SETTLED_BYTES and time.monotonic() < deadline:
        time.sleep(0.5)
    return now_bytes
