"""`python -m tests.languages [NAME…]`: run the examples in other languages against a server of ours.

The commands are those of docs/stubs.md as written, but for the address of the server. Of Debian's packages in them
those that are missing are installed first, which takes the rights of root. Each example has to print what our own
client gets, and the log of the server to show that it stopped what passed its deadline and what was cancelled.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kestrel_client import ChatMessage, Client, KestrelClientError
from tests.clients.__main__ import PICTURE, address_in, serving
from tests.clients.catalogue import CHECKOUT
from tests.clients.environments import NODE, NPM

LANGUAGES = {"go": "Go", "node": "TypeScript", "java": "Java", "cpp": "C++"}
"""The names of the languages, and their headings on the page."""
PAGE = (CHECKOUT / "docs" / "stubs.md").read_text(encoding="utf-8")
INSTALL = "apt-get install "
# An activated environment, with the Node.js that the type checker brings, so that none has to be on the machine.
ACTIVATED = {
    **os.environ,
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), str(NODE / "bin"), os.environ["PATH"])),
    "NPM": f"{NODE / 'bin' / 'node'} {NPM}",
    # The compiler for Java ends before what it would compile best, and clean in other threads, is of use.
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
# Others may hold the lock. The files need not outlive a crash of the machine, so apt need not wait for the disk.
APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Options::=--force-unsafe-io")
MAX_COMMAND_S = 600
"""Longer than any machine needs: a longer wait is a failure."""
MAX_SHOWN = 4000
"""Characters of what a failed command printed."""


class Failed(Exception):
    """A check failed; the message says why."""


def main() -> int:
    """Run the examples, and say how many checks did not succeed."""
    chosen = {name: commands_below(LANGUAGES[name]) for name in sys.argv[1:] or LANGUAGES}
    named = {name for commands in chosen.values() for command in commands for name in packages_of(command)}
    passed = [succeeds("packages", install, named)]
    with tempfile.TemporaryFile("w+") as log:
        with serving(1, "--log-level", "info", "--log-format", "json", log=log) as (announced,):
            address = address_in(announced)
            expected = answers(address)
            passed.append(succeeds("docs/stubs.md", check_page, expected))
            for name, commands in chosen.items():
                passed.append(succeeds(name, check_example, commands, address, expected))
        if all(passed):
            log.seek(0)
            passed.append(succeeds("log of the server", check_log, log, len(chosen)))
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


def commands_below(heading: str) -> list[str]:
    """The commands below a heading of the page."""
    return block(PAGE.partition(f"\n### {heading}\n")[2], "sh").replace("\\\n", " ").splitlines()


def block(text: str, kind: str) -> str:
    """The first block of a kind."""
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def packages_of(command: str) -> list[str]:
    """The packages that a command installs."""
    return shlex.split(command.removeprefix(INSTALL)) if command.startswith(INSTALL) else []


def install(names: Iterable[str]) -> None:
    """Install the packages of Debian that are missing."""
    listed = run(("dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n"), os.environ)
    missing = sorted(set(names) - {line.split()[0] for line in listed.splitlines() if line.endswith(" installed")})
    if missing:
        print(f"installs {' '.join(missing)}", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run((*APT, "update"), environment)
        run((*APT, "install", "--yes", "--no-install-recommends", *missing), environment)


def run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a command prints; raises `Failed` with the end of what it printed and complained about."""
    common = {"cwd": CHECKOUT, "env": environment, "capture_output": True, "text": True, "check": False}
    try:
        done = subprocess.run(command, timeout=MAX_COMMAND_S, **common)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{shlex.join(command)}\ntook more than {MAX_COMMAND_S} s") from error
    if done.returncode:
        raise Failed(f"{shlex.join(command)}\n{(done.stdout + done.stderr)[-MAX_SHOWN:]}")
    return done.stdout


def answers(address: str) -> str:
    """What an example has to print: what our own client gets."""
    with Client(address) as client:
        answer = client.query(PICTURE, "What is in this image?", temperature=0).result()
        lines = [f"query: {answer.answer} ({answer.usage.output_token_count} tokens)"]
        turns = [ChatMessage("user", "What is in this image?", [PICTURE]), ChatMessage("assistant", answer.answer)]
        turns.append(ChatMessage("user", "What color is the star?"))
        lines.append(f"chat: {client.complete_chat(turns, temperature=0).answer}")
        for box in (found.box for found in client.detect(PICTURE, "shape").objects):
            lines.append(f"detect: {box.x_min:.2f} {box.y_min:.2f} {box.x_max:.2f} {box.y_max:.2f}")
        try:
            client.detect(PICTURE, "shape", model="other")
        except KestrelClientError as error:
            lines.append(f"error: {error.reason}: {error.message}")
    return "\n".join((*lines, "deadline has passed: true", "cancelled: true", ""))


def succeeds(name: str, check: Callable[..., None], *arguments: Any) -> bool:
    """Run a check, and print how it ended."""
    started_s = time.monotonic()
    outcome, reason = "passed", ""
    try:
        check(*arguments)
    except Failed as error:
        outcome, reason = "failed", f": {error}"
    print(f"{name}: {outcome} after {time.monotonic() - started_s:.0f} s{reason}", flush=True)
    return outcome == "passed"


def check_page(expected: str) -> None:
    """The page shows what is printed, apart from digits: processors round differently."""
    shown = block(PAGE.partition("\n## Other languages\n")[2], "text")
    if re.sub(r"\d", "0", shown) != re.sub(r"\d", "0", expected):
        raise Failed(f"it shows\n{shown}\ninstead of\n{expected}")


def check_example(commands: Sequence[str], address: str, expected: str) -> None:
    """The commands build an example, and the last of them, which runs it, prints what is expected."""
    *build, example = (command for command in commands if not packages_of(command))
    run(("bash", "-euc", "\n".join(build)), ACTIVATED)
    printed = run(("bash", "-euc", example.replace("localhost:50051", address)), ACTIVATED)
    if printed != expected:
        raise Failed(f"it printed\n{printed}\ninstead of\n{expected}")


def check_log(log: Iterable[str], num_examples: int) -> None:
    """The server computed one query of our client and of each example, and stopped the others of each example."""
    calls = [json.loads(line) for line in log if line.startswith("{")]
    codes = Counter(call["code"] for call in calls if call.get("method") == "kestrel.v1.VisionService/Query")
    num_computed = codes.pop("OK", 0)
    # A machine that is too busy may not see a call before its deadline.
    if num_computed != num_examples + 1 or codes.total() < num_examples:
        raise Failed(f"it shows {num_computed} queries that were computed to their end, besides {dict(codes)}")


if __name__ == "__main__":
    sys.exit(main())
