"""What an attack is, what is seen while it lasts, and what must hold. Runs nothing."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
MAX_HEALTH_S, MAX_HEALTH_SINGLE_S = 2.0, 0.5
MAX_GROWTH_BYTES, MAX_GROWTH_PICTURES_BYTES = 500 * MIB, 1024 * MIB
MIN_ANSWERED = 0.98
MAX_ANSWER_PICTURES_S = 6.0
MAX_LOG_BYTES_PER_S = 100_000
MAX_END_S = 20.0
"""SIGTERM to the end of the process, whose drain timeout is 5 seconds."""


@dataclass(frozen=True, slots=True)
class Victim:
    """What an attacker knows: where the server is, and a token that is good there."""

    host: str
    port: int
    token: str
    http_port: int = 0
    """0 where the server has none."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Question:
    """What others ask meanwhile, and how soon they must have each answer; without a limit where `max_s` is None."""

    num_tokens: int = 3
    priority: int = 0
    """A number of the contract's `Priority`."""
    adapter: str = ""
    is_constrained: bool = False
    """By another regular expression each time."""
    max_s: float | None = None


Outcome = Counter[str]
"""How often what became of an attacker's calls."""


def nothing_to_prepare() -> None:
    """For attacks that need no time to make what they send."""


def nothing_to_check(outcome: Mapping[str, int], log: str) -> list[str]:
    """For attacks that may end in any way."""
    return []


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the table.

    `strike` runs in `num_processes` processes at a time; it is given the victim, how many seconds to last at most,
    and what `prepare` has made in the same process before the clock started. The server is started with
    `server_options`, and with `num_descriptors` at most.
    """

    name: str
    what: str
    strike: Callable[[Victim, float, Any], Outcome]
    prepare: Callable[[], Any] = nothing_to_prepare
    num_processes: int = 1
    is_single_message: bool = False
    sends_pictures: bool = False
    """Then others ask about pictures, too."""
    attacks_stored_images: bool = False
    """Then others store a picture, fetch its file and ask about it by its handle, each time."""
    is_by_operator: bool = False
    """Whether the attacker's token has the scope `admin`."""
    is_followed_by_sigterm: bool = False
    """As soon as the attackers have gone; otherwise the server first comes to rest."""
    server_options: tuple[str, ...] = ()
    num_descriptors: int | None = None
    num_adapters: int = 0
    """The server has so many adapters, named by number, and slots for few of them."""
    question: Question = Question()
    leaves_half: bool = False
    """Whether others must get at least half of the answers that they get while as many processes only compute."""
    needs_new_connections: bool = False
    """Whether others connect anew for each call."""
    check: Callable[[Mapping[str, int], str], list[str]] = nothing_to_check
    """What is wrong with the attackers' outcome or the server's log."""


@dataclass(frozen=True, slots=True)
class Witness:
    """What others got while the attack lasted: latencies in seconds, of those not answered so far as well."""

    health_s: tuple[float, ...]
    num_health_failures: int
    answers_s: tuple[float, ...]
    """Of the legitimate caller's questions that were answered."""
    failures: Mapping[str, int]
    """Of the others, by code."""

    @property
    def answered(self) -> float:
        num_asked = len(self.answers_s) + sum(self.failures.values())
        return len(self.answers_s) / num_asked if num_asked else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of the server and its children: before, at most while it was attacked, and afterwards."""

    before_bytes: int
    peak_bytes: int
    after_bytes: int
    was_killed: bool
    """The bench killed the server, which had grown over its limit."""

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes

    @property
    def kept_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """One attack as it went."""

    attack: Attack
    duration_s: float
    witness: Witness
    memory: Memory
    end_s: float | None
    """From SIGTERM to the end of the process; None where it had to be killed."""
    exit_status: int | None
    outcome: Mapping[str, int] = field(default_factory=dict)
    log: str = ""
    log_bytes: int = 0
    """Written to the log while the attack lasted."""
    usual_per_s: float | None = None
    """Answers a second of others while as many processes only compute; None if it was not measured."""

    @property
    def per_s(self) -> float:
        """Answers a second of others."""
        return len(self.witness.answers_s) / max(self.duration_s, 1e-3)

    def failures(self) -> list[str]:
        """What is not as required."""
        found: list[str] = []
        attack, witness, memory = self.attack, self.witness, self.memory
        limit_s = MAX_HEALTH_SINGLE_S if attack.is_single_message else MAX_HEALTH_S
        slowest_s = max(witness.health_s, default=0.0)
        if memory.was_killed:
            found.append("killed for its memory")
        if slowest_s > limit_s or not witness.health_s:
            found.append(f"health took {slowest_s:.2f} s, more than {limit_s:g}")
        if witness.num_health_failures:
            found.append(f"health failed {witness.num_health_failures} times")
        if witness.answered < MIN_ANSWERED:
            codes = ", ".join(f"{count} {code}" for code, count in witness.failures.items())
            found.append(f"{witness.answered:.0%} answered ({codes or 'nothing was asked'})")
        limit_bytes = MAX_GROWTH_PICTURES_BYTES if attack.sends_pictures else MAX_GROWTH_BYTES
        if memory.growth_bytes > limit_bytes:
            found.append(f"grew by {memory.growth_bytes / MIB:.0f} MiB, more than {limit_bytes / MIB:.0f}")
        if attack.sends_pictures and max(witness.answers_s, default=0.0) > MAX_ANSWER_PICTURES_S:
            found.append(f"an answer took {max(witness.answers_s):.1f} s, more than {MAX_ANSWER_PICTURES_S:g}")
        max_answer_s, slowest_answer_s = attack.question.max_s, max(witness.answers_s, default=0.0)
        if max_answer_s is not None and slowest_answer_s > max_answer_s:
            found.append(f"an answer took {slowest_answer_s:.1f} s, more than {max_answer_s:g}")
        if not memory.was_killed and (self.end_s is None or self.end_s > MAX_END_S):
            found.append("SIGTERM did not end the process")
        elif not memory.was_killed and self.exit_status:
            found.append(f"ended with status {self.exit_status}")
        if self.usual_per_s is not None and self.per_s < self.usual_per_s / 2:
            found.append(f"{self.per_s:.1f} answers a second, beside busy processes {self.usual_per_s:.1f}")
        if self.log_bytes > MAX_LOG_BYTES_PER_S * max(self.duration_s, 1.0):
            found.append(f"{self.log_bytes / max(self.duration_s, 1.0):,.0f} bytes of log a second")
        return found + attack.check(self.outcome, self.log)

    def as_json(self) -> dict[str, Any]:
        """Every number."""
        witness, memory = self.witness, self.memory
        return {
            "attack": self.attack.name,
            "what": self.attack.what,
            "duration_s": self.duration_s,
            "failures": self.failures(),
            "outcome": dict(self.outcome),
            "health_max_s": max(witness.health_s, default=None),
            "num_health": len(witness.health_s),
            "num_health_failures": witness.num_health_failures,
            "answered": witness.answered,
            "num_answers": len(witness.answers_s),
            "answer_p50_s": statistics.median(witness.answers_s) if witness.answers_s else None,
            "answer_max_s": max(witness.answers_s, default=None),
            "not_answered": dict(witness.failures),
            "log_bytes": self.log_bytes,
            "answers_per_s": self.per_s,
            "usual_answers_per_s": self.usual_per_s,
            "before_bytes": memory.before_bytes,
            "growth_bytes": memory.growth_bytes,
            "kept_bytes": memory.kept_bytes,
            "was_killed": memory.was_killed,
            "end_s": self.end_s,
            "exit_status": self.exit_status,
        }


def markdown(observations: list[Observation]) -> str:
    """The table."""
    rows = [
        "| attack | health max s | answered | answer p50 / max s | growth MiB | kept MiB | ended in s | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seen in observations:
        answers = sorted(seen.witness.answers_s)
        middle = f"{answers[len(answers) // 2]:.2f} / {answers[-1]:.2f}" if answers else "–"
        end = "–" if seen.end_s is None else f"{seen.end_s:.1f}"
        rows.append(
            f"| {seen.attack.what} | {max(seen.witness.health_s, default=0.0):.2f} | {seen.witness.answered:.1%} "
            f"| {middle} | {seen.memory.growth_bytes / MIB:.0f} | {seen.memory.kept_bytes / MIB:.0f} | {end} "
            f"| {'; '.join(seen.failures()) or 'held'} |"
        )
    return "\n".join(rows)
