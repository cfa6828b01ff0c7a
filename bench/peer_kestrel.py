"""The peer's engine on the same pictures and questions: kestrel, in process, with no network between.

Runs where its wheels are installed. A new engine for each batch size, in a process of its own so that it gives its
memory back; closed loop with as many requests at once as its batch holds. Rows have the fields of `serve.py`'s, for
`serve.py --peer`. Pieces of an answer come together here, so there is no time between them. Keys and values are
kept in float8, as the peer does where a checkpoint has their scales; the file that it loads gets some.

    python -m bench.peer_kestrel --model /tmp/md2 --json peer.json
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import sys
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.harness.output import Progress, parser_of, write_json
from bench.harness.serving import machine_facts
from bench.harness.summary import Row, summarise
from bench.harness.workload import WORKLOADS, Album, Workload
from bench.serve import ALONE
from kestrel_grpc.cli.bench.loops import ClosedLoop, Sample, Window
from kestrel_grpc.cli.bench.numbers import Objective
from kestrel_grpc.cli.bench.processes import Recording

PEER_FILE = "peer.safetensors"
_TRAINING_LAYOUT = "text_model.transformer."
_PACKAGES = ("kestrel", "kestrel-kernels", "kestrel-native")


class PeerEngine:
    """One engine of the peer's, asked as `load.py` asks a server."""

    def __init__(self, engine: Any, album: Album) -> None:
        self._engine = engine
        self._album = album
        self._numbers = itertools.count()

    @classmethod
    async def create(cls, folder: Path, max_batch_size: int, album: Album) -> PeerEngine:
        """Load the checkpoint in `folder` and warm up."""
        config = importlib.import_module("kestrel.config").RuntimeConfig(
            model=peer_model(folder),
            model_path=folder / PEER_FILE,
            tokenizer_path=folder / "tokenizer.json",
            max_batch_size=max_batch_size,
        )
        engine = await importlib.import_module("kestrel.engine").InferenceEngine.create(config)
        return cls(engine, album)

    async def close(self) -> None:
        """Stop it."""
        await self._engine.shutdown()

    async def ask(self, workload: Workload, started: float) -> Sample:
        """One request, whose error is the name of what it raised."""
        number = next(self._numbers)
        settings = {"temperature": 0.0, "max_tokens": workload.num_tokens}
        try:
            result = await self._engine.query(
                image=self._album.picture(workload, number),
                question=workload.question(number),
                reasoning=False,
                settings=settings,
            )
        except Exception as error:  # whatever it is, it is the peer's answer
            return Sample(started, time.perf_counter(), error=type(error).__name__)
        ended = time.perf_counter()
        first = ended - result.metrics.decode_time_ms / 1e3
        return Sample(started, ended, result.metrics.output_tokens, array("d", (first,)))

    async def record(self, workload: Workload, concurrency: int, duration_s: float, warm_up_s: float) -> Recording:
        """As `LoadProcesses.closed`."""
        loop = ClosedLoop(lambda started: self.ask(workload, started), concurrency)
        await loop.warm_up(warm_up_s)
        start, cpu_s = time.perf_counter(), time.process_time()
        window = Window(start, start + duration_s)
        await asyncio.sleep(duration_s)
        cpu_s = time.process_time() - cpu_s
        await loop.outlast(window)
        # Its engine does not stop generating when the caller leaves.
        loop.stop()
        await loop.end()
        return Recording(window, loop.overlapping(window), cpu_s / duration_s, 0.0)


def peer_model(folder: Path) -> str:
    """The peer's name for the kind of model in a folder."""
    text = json.loads((folder / "config.json").read_text())["text"]
    return "moondream3-preview" if text.get("moe") else "moondream2"


def write_peer_file(folder: Path) -> Path:
    """The weights as the peer loads them: one file, with scales for keys and values."""
    from safetensors.torch import load_file, save_file

    from bench.random_weights import kv_scales

    file, source = folder / PEER_FILE, folder / "model.safetensors"
    if file.exists():
        return file
    tensors = load_file(source)
    if any(name.startswith(_TRAINING_LAYOUT) for name in tensors):
        file.symlink_to(source.resolve())  # has its scales
    else:
        num_layers = json.loads((folder / "config.json").read_text())["text"]["n_layers"]
        save_file({**tensors, **kv_scales(num_layers)}, file)
    return file


def _run(pipe: Connection, arguments: argparse.Namespace, batch: int, names: list[str]) -> None:
    """A process of one batch size: sends a row for each workload, then None."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    asyncio.run(_measure(pipe, arguments, batch, names))


async def _measure(pipe: Connection, arguments: argparse.Namespace, batch: int, names: list[str]) -> None:
    peer = await PeerEngine.create(arguments.model, batch, Album(arguments.pictures))
    objective = Objective(arguments.first_token_objective_ms, arguments.per_token_objective_ms)
    for name in names:
        workload = WORKLOADS[name]
        recording = await peer.record(workload, batch, arguments.seconds, arguments.warm_up)
        pipe.send(summarise(name, batch, recording, workload.num_tokens, objective, is_open=False))
    pipe.send(None)
    await peer.close()


def measure(arguments: argparse.Namespace, batches: list[int], names: list[str], progress: Progress) -> list[Row]:
    """The rows of all batch sizes. What fails at one of them is left out, and said."""
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    for batch in batches:
        asked = [name for name in names if name not in ALONE or batch == batches[0]]
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(theirs, arguments, batch, asked), daemon=True)
        process.start()
        theirs.close()
        progress.begin(f"the peer, {batch} at once")
        try:
            while (row := ours.recv()) is not None:
                rows.append(row)
                progress.end(f"the peer, {row.workload}, {batch} at once: {row.requests_per_s:.1f} requests/s")
        except EOFError:
            print(f"the peer's process ended early at batch {batch}", file=sys.stderr)
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()
    return rows


def main() -> int:
    """Measure and write the JSON; 1 if nothing could be measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder that bench.random_weights wrote")
    parser.add_argument("--workloads", default="direct,cot,long,cached,text", help="default: %(default)s")
    parser.add_argument("--batches", default="1,4,16,64", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each window (default: %(default)g)")
    parser.add_argument("--warm-up", type=float, default=10.0, help="longest warm-up (default: %(default)g s)")
    parser.add_argument("--pictures", type=int, default=128, help="drawings to make (default: %(default)s)")
    parser.add_argument("--first-token-objective-ms", type=float, default=1000.0, help="default: %(default)g")
    parser.add_argument("--per-token-objective-ms", type=float, default=50.0, help="default: %(default)g")
    parser.add_argument("--json", type=Path, default=Path("bench/out/peer.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    names = arguments.workloads.split(",")
    batches = [int(batch) for batch in arguments.batches.split(",")]
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    write_peer_file(arguments.model)
    progress = Progress(len(names) * len(batches))
    rows = measure(arguments, batches, names, progress)
    progress.close()
    write_json(
        arguments.json, {"machine": machine_facts(), "peer": versions, "rows": [row.as_json() for row in rows]}
    )
    for row in rows:
        print(f"{row.workload} {row.load}: {row.requests_per_s:.1f} requests/s, {row.tokens_per_s:,.0f} tokens/s")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
