"""How long a new user waits for the built-in model: from the command to the open port, and from there to answers.

Starts the true command as a process of its own, cold, several times, and asks it over gRPC, one request at a time.
"""

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

from bench.harness.output import write_json
from kestrel_client import Client

COMMAND = (sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--log-level", "warning")
QUESTION = "What color is the star?"


def start() -> tuple[subprocess.Popen[str], str, float]:
    """A server, its address, and how long it took to open its port."""
    started = time.perf_counter()
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.split(" on ")[1].split()[0], time.perf_counter() - started


def ask(client: Client, picture: bytes, method: str) -> tuple[float, float]:
    """Seconds to the first piece of text and to the last."""
    started = time.perf_counter()
    if method == "caption":
        stream = client.caption(picture, temperature=0.0)
    else:
        stream = client.query(picture, QUESTION, temperature=0.0)
    first_s = None
    for _ in stream:
        first_s = time.perf_counter() - started if first_s is None else first_s
    total_s = time.perf_counter() - started
    return total_s if first_s is None else first_s, total_s


def measure(num_starts: int, num_requests: int) -> dict[str, list[float]]:
    """Seconds of every start and every request."""
    picture = files("kestrel_grpc").joinpath("demo_picture.png").read_bytes()
    results: dict[str, list[float]] = {"start to open port": []}
    for number in range(num_starts):
        process, address, ready_s = start()
        results["start to open port"].append(ready_s)
        try:
            if number == 0:
                with Client(address) as client:
                    for method in ("query", "caption"):
                        times = [ask(client, picture, method) for _ in range(num_requests)]
                        results[f"{method}, first token"] = [first_s for first_s, _ in times]
                        results[f"{method}, whole"] = [total_s for _, total_s in times]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    return results


def main() -> int:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5, help="cold starts (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=50, help="requests of each kind (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("bench/out/first_answer.json"), help="default: %(default)s"
    )
    arguments = parser.parse_args()
    results = measure(arguments.starts, arguments.requests)
    facts = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print("\n| what | count | p50 ms | p90 ms | max ms |\n|---|---|---|---|---|")
    for name, seconds in results.items():
        p90_s = statistics.quantiles(seconds, n=10)[-1]
        print(
            f"| {name} | {len(seconds)} | {1e3 * statistics.median(seconds):,.0f} | {1e3 * p90_s:,.0f} "
            f"| {1e3 * max(seconds):,.0f} |"
        )
    write_json(arguments.json, {"machine": facts, "seconds": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
