"""`kestrel-grpc serve` over a device that takes time and does no work: what the host costs, without a GPU.

A step takes as long as Moondream 2 takes on one H200 with everything in float8 (`results/details.md`), computes
nothing and samples the same token for all sequences; the server around it is the real one. Where it sustains less
than the device would, that is the host's doing; when it stops it tells how long the device had nothing to do.

    python -m bench.timed_server --slower 2.5 -- --port 50052 --max-batch-size 64 --max-tiles 56
    python -m bench.serve --target localhost:50052 --workloads cot,long --batches 64 --open none

Every image costs what nine tiles do; the built-in model cuts a chart into seven, of which eight charts make a step.
`--slower` stretches the device's times where this machine's cores are slower than those beside a GPU: requests and
tokens per second are then to be multiplied by it. Launching costs the host what it costs to replay a step of some
images. Options after `--` go to the server.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from kestrel_grpc.__main__ import main as kestrel_grpc
from kestrel_runtime.execution.step_runner import StepHandle
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles, Tiling, keep_decoded
from kestrel_runtime.models.moondream.executor import new_step_runner
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.scheduling.batch import Batch, EncodeItem
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.scheduling.sequence import Sequence

_LETTER = Token(70)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a part of a step: what the device takes, and what the host takes to launch it."""

    device_ms: float
    each_ms: float
    """For each image, prompt or sequence."""
    launch_ms: float


ENCODE, PREFILL, DECODE = Cost(0.3, 6.6, 2.5), Cost(0.5, 2.0, 1.4), Cost(1.1, 0.022, 0.1)
BESIDE_MS = 4.3
"""What a step of decoding takes beside prompts, at least."""
HOLDS_UP = Cost(0.35, 0.032, 0.0)
"""How much longer the prompts take then."""


@dataclass(slots=True)
class Work:
    """Something that the device does until a moment, which others may put off."""

    ends: float


class Device:
    """Does prompts one after the other, and steps of decoding beside them, and keeps count."""

    def __init__(self, slower: float) -> None:
        self._slower = slower
        self._began: float | None = None
        self._prompts: deque[Work] = deque()
        self._decoding = Work(0.0)
        self._busy_until = self._busy_s = 0.0

    @property
    def idle_share(self) -> float:
        """Of the time from the first work to the end of the last."""
        return 0.0 if self._began is None else 1.0 - self._busy_s / (self._busy_until - self._began)

    def take_in(self, cost: Cost, count: float, after: Work | None = None) -> Work:
        """Take the time of `count` images or prompts. Comes back when the host has launched it."""
        start = self._start(self._prompts[-1] if self._prompts else None, after)
        while self._prompts and self._prompts[0].ends <= start:
            self._prompts.popleft()
        work = Work(start + self._seconds(cost, count))
        self._prompts.append(work)
        self._be_busy(start, work.ends)
        self._launch(cost)
        return work

    def decode(self, count: int, after: Work | None = None) -> Work:
        """Take the time of a step for `count` sequences. Comes back when the host has launched it."""
        start = self._start(self._decoding, after)
        duration = self._seconds(DECODE, count)
        held_up = [work for work in self._prompts if work.ends > start]
        if held_up:
            duration = max(duration, 1e-3 * self._slower * BESIDE_MS)
            self._be_busy(self._busy_until, self._busy_until + self._seconds(HOLDS_UP, count))
        for work in held_up:
            work.ends += self._seconds(HOLDS_UP, count)
        self._decoding = Work(start + duration)
        self._be_busy(start, self._decoding.ends)
        self._launch(DECODE)
        return self._decoding

    def _start(self, *before: Work | None) -> float:
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        return max([now, *(work.ends for work in before if work is not None)])

    def _seconds(self, cost: Cost, count: float) -> float:
        return 1e-3 * self._slower * (cost.device_ms + count * cost.each_ms)

    def _be_busy(self, start: float, end: float) -> None:
        # What was there before is counted already.
        self._busy_s += max(0.0, end - max(start, self._busy_until))
        self._busy_until = max(end, self._busy_until)

    def _launch(self, cost: Cost) -> None:
        launched, number = time.perf_counter() + 1e-3 * self._slower * cost.launch_ms, torch.zeros(1)
        while time.perf_counter() < launched:
            torch.add(number, 1)  # which lets go of the interpreter as a launch does


class TimedHandle(StepHandle):
    """A step in flight."""

    def __init__(self, sampled: Iterable[Sequence], places: Mapping[int, tuple[float, ...]], work: Work) -> None:
        """places: what tokens that are places stand for, by token id."""
        self._to_sample = sampled
        self._places = places
        self.work = work

    def is_complete(self) -> bool:
        return self.work.ends <= time.perf_counter()

    def wait(self) -> list[Token]:
        while not self.is_complete():
            time.sleep(max(0.0, self.work.ends - time.perf_counter()))
        return [self._sample(sequence) for sequence in self._to_sample]

    def _sample(self, sequence: Sequence) -> Token:
        allowed = sequence.parser.rule.allowed
        return _LETTER if allowed is None else Token(allowed[-1], self._places.get(allowed[-1], ()))


class TimedRunner:
    """Lays out a step's inputs as a `StepRunner` does and has a device of its own take the time of them."""

    is_asynchronous = True

    def __init__(self, device: Device, model: Moondream, *arguments: Any, **options: Any) -> None:
        """The arguments of `new_step_runner`, behind the device that takes its steps."""
        ids = model.config.tokenizer
        self._runner = new_step_runner(model, *arguments, **options)
        self._device = device
        self._places = {ids.coord_id: (0.5,), ids.size_id: (0.5, 0.5)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch, after: Iterable[StepHandle] = ()) -> StepHandle:
        # Steps of a kind run one after the other, so the one that ends last is the one to wait for.
        works = [handle.work for handle in after if isinstance(handle, TimedHandle)]
        before = max(works, key=lambda work: work.ends, default=None)
        if batch.kind == "decode":
            self._runner._decode_inputs(list(batch.decode))
            return TimedHandle(batch.sampled, self._places, self._device.decode(len(batch.decode), before))
        work = None
        if batch.encode:
            work = self._device.take_in(ENCODE, sum(_share(part) for part in batch.encode), before)
        if batch.prefill:
            self._runner._prefill_inputs(list(batch.prefill), list(batch.sampled))
            work = self._device.take_in(PREFILL, len(batch.prefill), before)
        assert work is not None, "the loop launches no empty steps"
        return TimedHandle(batch.sampled, self._places, work)


def _share(part: EncodeItem) -> float:
    """How much of its image is encoded."""
    assert part.sequence.tiles is not None, "only sequences with an image have tiles"
    return (part.end_tile - part.first_tile) / part.sequence.tiles.num_tiles


def _without_tiles(tiling: Tiling, *_: object, max_images: int) -> partial[DecodedImage | Tiles]:
    return partial(keep_decoded, tiling=tiling)


def main() -> int:
    """Serve until a signal, then say how busy the device was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=1.0, help="stretch the device's times (default: 1)")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    arguments = parser.parse_args()
    device = Device(arguments.slower)
    # Images would be tiled on the device, which does no work.
    with (
        patch("kestrel_runtime.models.moondream.prepared.new_step_runner", partial(TimedRunner, device)),
        patch("kestrel_runtime.engine.build.DeviceTiler", _without_tiles),
    ):
        status = kestrel_grpc(["serve", "--resize-on-device", "on", *arguments.options])
    print(f"the device was idle for {device.idle_share:.1%} of the time")
    return status


if __name__ == "__main__":
    sys.exit(main())
