"""What it costs to have everything switched on: our front end against itself, with an empty engine, in one run.

Off is the server as it starts by default. On has tokens, metrics, traces to a receiver, and a log in JSON; the last
rows add encryption. Servers and load have a core each, rounds alternate, and the ratio is the median of neighbours.
"""

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import trustme
import uvloop

from bench.frontend import WORKLOADS, EmptyEngine, Target, compare, pin, serve_engine
from bench.harness.output import write_json
from kestrel_grpc.access.token_file import Scope, line_for, new_secret
from kestrel_grpc.config.options import ServerConfig

TARGET_RATIO = 0.8


class TraceSink(BaseHTTPRequestHandler):
    """Takes whatever it is sent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def receive_traces(pipe: Connection) -> None:
    """A receiver's process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), TraceSink)
    pipe.send(server.server_port)
    server.serve_forever()


async def serve(config: ServerConfig, pipe: Connection) -> None:
    """Our server, as the command sets it up."""
    await serve_engine(pipe, EmptyEngine(), config)


@dataclass(frozen=True)
class BearingChannel:
    """A channel whose calls bear a token."""

    channel: grpc.aio.Channel
    token: str

    def unary_stream(self, path: str) -> Callable[[bytes], Any]:
        return partial(self.channel.unary_stream(path), metadata=self._metadata)

    def unary_unary(self, path: str) -> Callable[[bytes], Any]:
        return partial(self.channel.unary_unary(path), metadata=self._metadata)

    async def close(self) -> None:
        await self.channel.close()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)


class BearingTarget(Target):
    """A server that asks for a token, and for encryption where there is an authority to trust."""

    def __init__(
        self, name: str, config: ServerConfig, core: int | None, token: str, authority: trustme.CA | None
    ) -> None:
        super().__init__(name, partial(serve, config), core)
        channel = self.channel
        if authority is not None:
            credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            channel = grpc.aio.secure_channel(self.address, credentials)
        self.channel: Any = BearingChannel(channel, token)


async def run(folder: Path, rounds: int, duration_s: float) -> list[dict[str, Any]]:
    """Every load on the server with everything on, without and with encryption."""
    token, authority = new_secret(), trustme.CA()
    (folder / "tokens.toml").write_text(line_for("bench", token, frozenset((Scope.INFER,))) + "\n")
    leaf = authority.issue_cert("127.0.0.1")
    (folder / "key.pem").write_bytes(leaf.private_key_pem.bytes())
    (folder / "certificate.pem").write_bytes(leaf.cert_chain_pems[0].bytes())
    on: dict[str, Any] = {
        "port": 0,
        "tokens": str(folder / "tokens.toml"),
        "metrics_port": 0,
        "tracing": True,
        "log_format": "json",
    }
    encryption: dict[str, Any] = {
        "tls_certificate": str(folder / "certificate.pem"),
        "tls_key": str(folder / "key.pem"),
    }
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    off = Target("off", partial(serve, ServerConfig(port=0)), server_core)
    targets = [
        BearingTarget("on", ServerConfig(**on), server_core, token, None),
        BearingTarget("on, encrypted", ServerConfig(**on, **encryption), server_core, token, authority),
    ]
    pin(client_core)
    try:
        return [await compare(load, target, off, rounds, duration_s) for target in targets for load in WORKLOADS]
    finally:
        for target in (off, *targets):
            await target.close()


def main() -> int:
    """Print the table and write the JSON; exit 1 where what is on without encryption misses the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of rounds per load (default: 8)")
    parser.add_argument("--seconds", type=float, default=0.75, help="length of a round (default: 0.75)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/features.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive_traces, args=(theirs,), daemon=True)
    receiver.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{ours.recv()}"
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(run(Path(folder), arguments.rounds, arguments.seconds))
    receiver.terminate()
    head = ("load", "in flight", "features", "on/s", "off/s", "ratio", "on CPU µs", "off CPU µs", "CPU ratio")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in results:
        print(
            f"| {row['load']} | {row['in_flight']} | {row['engine']} "
            f"| {row['ours_per_s']:,.0f} | {row['bare_per_s']:,.0f} | {row['ratio']:.2f} "
            f"| {row['ours_cpu_us']:.1f} | {row['bare_cpu_us']:.1f} | {row['cpu_ratio']:.2f} |"
        )
    facts = {"python": platform.python_version(), "grpcio": grpc.__version__, "cores": os.cpu_count()}
    write_json(arguments.json, {"machine": facts, "results": results})
    return 0 if all(row["ratio"] >= TARGET_RATIO for row in results if row["engine"] == "on") else 1


if __name__ == "__main__":
    sys.exit(main())
