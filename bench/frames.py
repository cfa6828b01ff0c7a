"""How old are the answers about the frames of a camera that is faster than the model, and does memory stay flat?

A camera gives frames at a fixed rate to the Python client; a server in a process of its own answers them, where
gRPC and all that is not the engine are real, and the engine takes a stated time for each frame. The age of an
answer is the time from the moment at which the camera gives the frame until the client has the answer. The client
takes `--reader-ms` for each answer.

    python -m bench.frames
    python -m bench.frames --seconds 600 --json /tmp/frames.json
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.attacks.target import resident_bytes
from bench.harness.output import parser_of, write_json
from bench.harness.serving import machine_facts
from kestrel_client import AsyncClient
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.events import Box, DetectOutput, Finished, FinishReason, Started, Usage
from kestrel_runtime.api.requests import Request
from tests.fakes import TIMING, FakeEngine

_MIB = 2**20
_SAMPLE_S = 1.0
_USAGE = Usage(735, 729, 4)


@dataclass(frozen=True, slots=True)
class Camera:
    """A camera, its model, and who reads the answers."""

    frames_per_s: float
    model_ms: float
    reader_ms: float
    frame_bytes: int
    seconds: float


@dataclass(slots=True)
class Recording:
    """The ages of the answers in seconds, the frames, and the resident memory of both processes as time passes."""

    ages_s: list[float] = field(default_factory=list)
    num_frames: int = 0
    num_dropped: int = 0
    server_bytes: list[int] = field(default_factory=list)
    client_bytes: list[int] = field(default_factory=list)

    def facts(self, camera: Camera) -> dict[str, Any]:
        """The numbers of a row."""
        ages = sorted(self.ages_s)
        return {
            "frames_per_s": camera.frames_per_s,
            "model_ms": camera.model_ms,
            "reader_ms": camera.reader_ms,
            "seconds": camera.seconds,
            "frames": self.num_frames,
            "answers": len(ages),
            "dropped": self.num_dropped,
            "answers_per_s": len(ages) / camera.seconds,
            "age_ms": {
                "median": 1000.0 * statistics.median(ages),
                "p99": 1000.0 * ages[int(0.99 * (len(ages) - 1))],
                "largest": 1000.0 * ages[-1],
            },
            "server_mib": _growth(self.server_bytes),
            "client_mib": _growth(self.client_bytes),
        }


def _growth(samples: list[int]) -> dict[str, float]:
    """The memory after a tenth of the time, when all is warm, and at the end."""
    return {"warm": samples[len(samples) // 10] / _MIB, "end": samples[-1] / _MIB, "largest": max(samples) / _MIB}


async def record(address: str, server_pid: int, camera: Camera) -> Recording:
    """Sends frames for so long and reads the answers."""
    found, given_at = Recording(), list[float]()
    picture = os.urandom(camera.frame_bytes)

    async def frames() -> AsyncIterator[bytes]:
        began = time.monotonic()
        while (now := time.monotonic()) < began + camera.seconds:
            due = began + len(given_at) / camera.frames_per_s
            if now < due:
                await asyncio.sleep(due - now)
            given_at.append(time.monotonic())
            yield len(given_at).to_bytes(8) + picture

    async def watch() -> None:
        while True:
            found.server_bytes.append(resident_bytes(server_pid))
            found.client_bytes.append(resident_bytes(os.getpid()))
            await asyncio.sleep(_SAMPLE_S)

    watching = asyncio.create_task(watch())
    async with AsyncClient(address) as client, client.detect_frames(frames(), "car", track=True) as stream:
        async for answer in stream:
            if answer.error is not None:
                raise answer.error
            found.ages_s.append(time.monotonic() - given_at[answer.index])
            found.num_dropped = answer.dropped_count
            await asyncio.sleep(camera.reader_ms / 1000.0)
        load = await client.load()
    watching.cancel()
    if load.running_request_count:
        raise RuntimeError("requests are left behind")
    found.num_frames = len(given_at)
    return found


async def serve(model_s: float) -> None:
    """Until a signal: finds a box in each frame after a time."""
    loop = asyncio.get_running_loop()

    def script(request: Request) -> Iterable[object]:
        is_answered = asyncio.Event()
        loop.call_later(model_s, is_answered.set)
        yield Started(Usage(735, 729))
        yield is_answered
        yield Finished(DetectOutput((Box(0.25, 0.25, 0.5, 0.5),)), FinishReason.STOP, _USAGE, TIMING)

    engine = _Forgetful(script)
    await Server(engine, ServerConfig(port=0, withdrawal_delay=0.0)).serve()


class _Forgetful(FakeEngine):
    """An engine that keeps no record of what it was asked, whose memory would grow."""

    def submit_samples(self, request: Request, **how: Any) -> list[Any]:
        streams = super().submit_samples(request, **how)
        for record in (self.requests, self.deadlines_s, self.tenants, self.namespaces):
            record.clear()
        return streams


def run(camera: Camera) -> dict[str, Any]:
    """The numbers of one camera, with a server of its own."""
    command = (sys.executable, "-m", "bench.frames", "--serve", str(camera.model_ms / 1000.0))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "asked for a pipe"
        try:
            line = process.stdout.readline()
            if " on " not in line:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            address = line.split(" on ")[1].split()[0]
            return asyncio.run(record(address, process.pid, camera)).facts(camera)
        finally:
            process.kill()


def main() -> None:
    """Print a line for each camera, and write the numbers."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--frames-per-s", type=float, default=30.0)
    parser.add_argument("--model-ms", type=float, default=200.0)
    parser.add_argument("--reader-ms", type=float, nargs="+", default=[0.0, 500.0])
    parser.add_argument("--frame-bytes", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve))
        return
    rows: list[dict[str, Any]] = []
    for reader_ms in arguments.reader_ms:
        camera = Camera(
            arguments.frames_per_s, arguments.model_ms, reader_ms, arguments.frame_bytes, arguments.seconds
        )
        row = run(camera)
        rows.append(row)
        print(
            f"reader {reader_ms:.0f} ms: {row['frames']} frames, {row['answers_per_s']:.1f} answers/s, "
            f"{row['dropped']} dropped; age {row['age_ms']['median']:.0f} ms, 99% {row['age_ms']['p99']:.0f} ms, "
            f"largest {row['age_ms']['largest']:.0f} ms; server {row['server_mib']['warm']:.1f} MiB warm, "
            f"{row['server_mib']['end']:.1f} MiB at the end"
        )
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine_facts(), "rows": rows})


if __name__ == "__main__":
    main()
