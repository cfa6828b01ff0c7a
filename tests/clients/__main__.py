"""`python -m tests.clients [NAME…]`: run the clients of others against a server of ours, or those that are named.

Each program gets the addresses and the tokens as a JSON object in its first argument, and prints a line for
each thing that it has checked. Without names, those run that are in CI; with `ALL=1` all, and their results
become rows of the table in docs/clients.md. With `NEWEST=1` each has the newest versions of its packages
instead of the pinned ones. A client whose package index does not answer is skipped, at most three of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import google.rpc

from tests.clients.catalogue import CHECKOUT, CLIENTS, Client
from tests.clients.environments import ENVIRONMENTS, NODE, Unavailable, command, versions
from tests.clients.matrix import PAGE, Result, write_matrix

PICTURE = CHECKOUT / "kestrel_grpc" / "demo_picture.png"
MAX_SKIPPED = 3
MAX_PROGRAM_S = 300
"""Longer than any program needs: a longer run is a failure."""
_TOKENS = ("alice", "operator", "limited")


def main() -> int:
    """Run the clients, and say how many did not succeed."""
    is_newest, runs_all = bool(os.environ.get("NEWEST")), bool(os.environ.get("ALL"))
    names = sys.argv[1:]
    chosen = [client for client in CLIENTS if (client.name in names if names else runs_all or client.in_ci)]
    if unknown := set(names) - {client.name for client in chosen}:
        print(f"no client has the name {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as facts,
        serving(1) as (announced,),
        ThreadPoolExecutor(1) as installer,
    ):
        facts["open"] = address_in(announced)  # it asks for no tokens
        # The next ones are installed while one runs.
        pending = [(client, installer.submit(_prepared, client, is_newest)) for client in chosen]
        for client, installed in pending:
            try:
                arguments, found = installed.result()
                result = _run(client, found, (*arguments, json.dumps(facts)))
            except Unavailable as reason:
                result = Result(client, skipped=str(reason))
            except subprocess.CalledProcessError:
                result = Result(client, failed="it could not be installed")
            results.append(result)
            print(result.line(), flush=True)
    if runs_all and not is_newest:
        write_matrix(results, str(datetime.now(UTC).date()), _machine())
        print(f"wrote the table of {PAGE.relative_to(CHECKOUT)}")
    num_failed = sum(bool(result.failed) for result in results)
    num_skipped = sum(bool(result.skipped) for result in results)
    print(f"{len(results) - num_failed - num_skipped} passed, {num_failed} failed, {num_skipped} skipped")
    return 1 if num_failed or num_skipped > MAX_SKIPPED or num_skipped == len(results) else 0


def _prepared(client: Client, is_newest: bool) -> tuple[Sequence[str], str]:
    """Returns the command of the client's program, and the versions that are installed."""
    return command(client, is_newest=is_newest), versions(client, ENVIRONMENTS / client.name)


def _run(client: Client, found: str, arguments: Sequence[str]) -> Result:
    started_s = time.monotonic()
    try:
        done = subprocess.run(arguments, check=False, timeout=MAX_PROGRAM_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return Result(client, found, failed=f"it ran longer than {MAX_PROGRAM_S} s")
    checks = tuple(done.stdout.splitlines())
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    failed = f"status {done.returncode}, after: {checks[-1] if checks else 'nothing'}" if done.returncode else ""
    return Result(client, found, checks, time.monotonic() - started_s, failed=failed)


def _machine() -> str:
    node = subprocess.run((str(NODE / "bin" / "node"), "--version"), check=True, capture_output=True, text=True)
    version = node.stdout.strip().removeprefix("v")
    return f"Python {platform.python_version()} and Node.js {version} on {platform.system()}"


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """A server that asks for tokens: where it is, a token for each purpose, and where the contract is."""
    facts: dict[str, str] = {
        "picture": str(PICTURE),
        "proto": str(CHECKOUT / "proto"),
        # The folder that has google/rpc/*.proto.
        "google": str(Path(google.rpc.__path__[0]).parents[1]),
        "python": sys.executable,
    }
    lines: list[str] = []
    for name in _TOKENS:
        facts[name] = f"kestrel_of_{name}_{'0' * 32}"
        scopes = '["admin"]' if name == "operator" else '["infer"]'
        limits = ", rate = 2, burst = 1" if name == "limited" else ""
        digest = hashlib.sha256(facts[name].encode()).hexdigest()
        lines.append(f'{name} = {{ sha256 = "{digest}", scopes = {scopes}{limits} }}\n')
    tokens = folder / "tokens.toml"
    tokens.write_text("".join(lines))
    options = ("--http-port", "0", "--tokens", str(tokens), "--triton-shared-memory", "kestrel-")
    with serving(2, *options) as (grpc, http):
        yield {**facts, "grpc": address_in(grpc), "http": f"http://{address_in(http)}"}


@contextmanager
def serving(num_lines: int, *options: str, log: IO[str] | None = None) -> Iterator[list[str]]:
    """A server in a process of its own, and the lines that it prints when it listens; `log` gets its log."""
    serve = (sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--log-level", "error", *options)
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline() for _ in range(num_lines)]
        finally:
            process.terminate()
    assert process.returncode == 0, "the server did not end as told"


def address_in(line: str) -> str:
    """Where a server listens, from a line that it prints."""
    return line.split(" on ")[1].split()[0]


if __name__ == "__main__":
    sys.exit(main())
