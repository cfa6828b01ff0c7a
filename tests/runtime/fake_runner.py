"""A runner without a model: steps are over when the test says so, and every sequence draws the same token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kestrel_runtime.interfaces.tokens import Token
from kestrel_runtime.scheduling.sequence import Batch, Sequence

TOKEN = Token(5)


class FakeLaunch:
    """A step in flight."""

    over = None

    def __init__(self, runner: FakeRunner, batch: Batch) -> None:
        self.batch = batch
        self._runner = runner
        self._ids = [sequence.id for sequence in batch.due]

    @property
    def is_over(self) -> bool:
        return self._runner.are_prompts_over()

    def land(self) -> dict[int, Token]:
        self._runner.on_land(self)
        return dict.fromkeys(self._ids, TOKEN)


class FakeRunner:
    """Stands in for `ModelRunner`. The hooks may block or raise, as a device does.

    `are_prompts_over` answers for a step that the loop asks about; `on_launch` and `on_land` run in the engine
    thread, the first before a step begins, the second where the loop waits for its end.
    """

    is_asynchronous = True

    def __init__(self, *_: Any) -> None:
        self.are_prompts_over: Callable[[], bool] = lambda: True
        self.on_launch: Callable[[Batch], None] = lambda batch: None
        self.on_land: Callable[[FakeLaunch], None] = lambda launch: None
        self.on_run: Callable[[Batch], None] = lambda batch: None
        self.num_restarts = 0
        self.num_emptied = 0

    def record(self) -> None: ...

    def launch(self, batch: Batch, after: FakeLaunch | None = None) -> FakeLaunch:
        self.on_launch(batch)
        return FakeLaunch(self, batch)

    def run(self, batch: Batch) -> dict[int, Token]:
        """What `Recovery` runs requests of our own with."""
        self.on_run(batch)
        return dict.fromkeys((sequence.id for sequence in batch.due), TOKEN)

    def release(self, sequence: Sequence) -> None: ...

    def forget_images(self) -> None: ...

    def empty_device_cache(self) -> None:
        self.num_emptied += 1

    def restart(self) -> None:
        self.num_restarts += 1
