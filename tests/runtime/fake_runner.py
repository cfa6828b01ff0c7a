"""A runner without a model: steps are complete when the test says so, and every sequence gets the same token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kestrel_runtime.output.embedding import ImageEmbeddings
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.sequence import TokenSequence

TOKEN = Token(5)


class FakeHandle:
    """A step in flight."""

    done: Any = None

    def __init__(self, runner: FakeRunner, batch: Batch) -> None:
        self.batch = batch
        self._runner = runner

    def is_complete(self) -> bool:
        return self._runner.are_prompts_over()

    def wait(self) -> list[Token]:
        self._runner.on_wait(self)
        return [self._runner.token_of(sequence) for sequence in self.batch.sampled]

    def embeddings(self) -> list[ImageEmbeddings]:
        """Two patches of one number, which is finite but for the request of that name."""
        return [
            ImageEmbeddings((0.5,), 2, bytes(4), sequence.request.fingerprint != "infinite")
            for sequence in self.batch.read
        ]


class FakeRunner:
    """Stands in for `StepRunner`. The hooks may block or raise, as a device does.

    `are_prompts_over` answers for a step that the loop asks about; `on_launch` and `on_wait` run in the engine
    thread, the first before a step begins, the second where the loop waits for its end.
    """

    is_asynchronous = True
    num_cached_images = num_cached_crops = 0
    bytes_per_image = bytes_per_crop = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.are_prompts_over: Callable[[], bool] = lambda: True
        self.on_launch: Callable[[Batch], None] = lambda batch: None
        self.on_wait: Callable[[FakeHandle], None] = lambda handle: None
        self.token_of: Callable[[TokenSequence], Token] = lambda sequence: TOKEN
        self.on_sample: Callable[[FakeHandle], None] = lambda handle: None
        self.on_run: Callable[[Batch], None] = lambda batch: None
        self.on_capture_wanted: Callable[[], bool] = lambda: False
        self.num_restarts = 0
        self.num_emptied = 0

    def capture(self) -> None: ...

    def capture_wanted(self) -> bool:
        """Whether there was a graph to capture, in a time without work."""
        return self.on_capture_wanted()

    def launch(self, batch: Batch, after: Iterable[FakeHandle] = ()) -> FakeHandle:
        self.on_launch(batch)
        return FakeHandle(self, batch)

    def sample(self, step: FakeHandle, masks: list[Any]) -> None:
        """The rest of a restricted step."""
        self.on_sample(step)

    def run(self, batch: Batch) -> list[Token]:
        """What `Isolation` runs probes with."""
        self.on_run(batch)
        return [TOKEN] * len(batch.sampled)

    def release(self, sequence: TokenSequence) -> None: ...

    def close_row(self, sequence: TokenSequence) -> None: ...

    def forget_images(self) -> None: ...

    def empty_device_cache(self) -> None:
        self.num_emptied += 1

    def restart(self) -> None:
        self.num_restarts += 1
