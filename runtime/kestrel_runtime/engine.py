"""The engine: the only door into this package. Requests go in, streams of events come out.

Knows the queue's bound and the engine's state; the work is done by `Preprocessor` and `EngineLoop`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto

from kestrel_runtime.config import EngineConfig
from kestrel_runtime.errors import (
    EngineUnavailable,
    ImageError,
    InternalError,
    KestrelError,
    ModelNotFound,
    Overloaded,
    SkillUnsupported,
)
from kestrel_runtime.loading import LoadedModel
from kestrel_runtime.loop import EngineLoop
from kestrel_runtime.pages import PagePool
from kestrel_runtime.preprocess import Preprocessor
from kestrel_runtime.requests import Request
from kestrel_runtime.runner import ModelRunner
from kestrel_runtime.scheduler import Scheduler
from kestrel_runtime.sequence import Sequence, SequenceClock
from kestrel_runtime.stream import Stream


class EngineStatus(Enum):
    """What the engine does with new requests."""

    SERVING = auto()
    DRAINING = auto()
    """Refuses new requests, finishes those it has."""
    DEAD = auto()
    """Closed, or stopped by a failure."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is served, for discovery."""

    model: str
    revision: str | None
    architecture: str
    skills: tuple[str, ...]
    device: str
    dtype: str
    max_context_tokens: int
    num_parameters: int
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Load:
    """A reading of how busy the engine is."""

    num_running: int
    num_waiting: int
    num_preprocessing: int
    num_used_pages: int
    num_pages: int
    tokens_per_second: float


class Engine:
    """One model, one thread, one page pool. `submit` belongs to an event loop; the rest may be called anywhere."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        cache = loaded.new_cache(config)
        model_config = loaded.model.config
        self._pages = PagePool(cache.num_pages, config.page_size)
        max_context = min(model_config.text.max_context, cache.num_pages * config.page_size)
        self.info = EngineInfo(
            model=loaded.checkpoint.name,
            revision=loaded.checkpoint.revision,
            architecture=f"moondream{model_config.generation}",
            skills=model_config.skills,
            device=loaded.model.device.type,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            max_context_tokens=max_context,
            num_parameters=loaded.num_parameters,
            config=config,
        )
        scheduler = Scheduler(
            self._pages,
            max_batch_size=config.max_batch_size,
            max_prefill_tokens=config.max_prefill_tokens,
            max_crops_per_step=config.max_crops_per_step,
            ageing_s=config.ageing_s,
        )
        self._preprocessor = Preprocessor(
            model_config,
            loaded.tokenizer,
            max_context=max_context,
            max_image_pixels=config.max_image_pixels,
            num_threads=config.num_preprocess_threads,
        )
        self._loop = EngineLoop(scheduler, ModelRunner(loaded.model, cache), on_death=self._die)
        self._status = EngineStatus.SERVING
        self._lock = threading.Lock()
        self._num_preprocessing = 0
        self._streams: set[Stream] = set()
        self._callbacks: list[Callable[[EngineStatus], None]] = []
        self._loop.start()

    @classmethod
    def start(cls, config: EngineConfig) -> Engine:
        """Load the model and start. Blocks. Raises `CheckpointError`."""
        return cls(LoadedModel.load(config), config)

    @property
    def status(self) -> EngineStatus:
        return self._status

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        """Have `callback` run, in whatever thread it happens, whenever the status changes."""
        self._callbacks.append(callback)

    def submit(self, request: Request, *, deadline_s: float | None = None, tenant: str = "") -> Stream:
        """Queue a request; `deadline_s` seconds from now nobody waits for it any more.

        Requests of different `tenant`s share the engine evenly; "" is a tenant like any other.

        Raises `EngineUnavailable`, `ModelNotFound`, `SkillUnsupported`, `ImageError` and `Overloaded` at once;
        what is found out later is raised by the stream.
        """
        self._check(request)
        now = time.monotonic()
        max_queue_s = request.options.max_queue_s
        clock = SequenceClock(
            submitted=now,
            deadline=None if deadline_s is None else now + deadline_s,
            queue_deadline=None if max_queue_s is None else now + max_queue_s,
        )
        stream = Stream()
        self._streams.add(stream)
        stream.over.add_done_callback(lambda _: self._streams.discard(stream))
        with self._lock:
            self._num_preprocessing += 1
        preparation = self._preprocessor.submit(request, clock, tenant)
        stream.on_cancel(lambda: self._cancel(preparation, stream))
        preparation.add_done_callback(lambda done: self._prepared(done, stream))
        return stream

    def load(self) -> Load:
        """How busy the engine is now."""
        return Load(
            num_running=self._loop.num_active,
            num_waiting=self._loop.num_waiting,
            num_preprocessing=self._num_preprocessing,
            num_used_pages=self._pages.num_used,
            num_pages=self._pages.num_pages,
            tokens_per_second=self._loop.tokens_per_second(),
        )

    async def drain(self) -> None:
        """Take no new requests, and return when all of this event loop's have ended."""
        self._become(EngineStatus.DRAINING)
        own = [stream.over for stream in self._streams]
        if own:
            await asyncio.wait(own)

    def close(self) -> None:
        """Stop now; what still runs fails with `EngineUnavailable`. Blocks until the threads are gone."""
        self._become(EngineStatus.DEAD)
        self._preprocessor.close()
        self._loop.close()

    def _check(self, request: Request) -> None:
        if self._status is not EngineStatus.SERVING:
            raise EngineUnavailable(f"the engine is {self._status.name.lower()}")
        if request.options.model not in ("", self.info.model):
            raise ModelNotFound(request.options.model)
        if request.skill not in self.info.skills:
            raise SkillUnsupported(request.skill, self.info.model)
        max_image_bytes = self.info.config.max_image_bytes
        if request.image is not None and len(request.image) > max_image_bytes:
            raise ImageError(f"the image must not exceed {max_image_bytes} bytes", too_large=True)
        max_queued = self.info.config.max_queued_requests
        if self._num_preprocessing + self._loop.num_waiting >= max_queued:
            raise Overloaded(max_queued, retry_after_s=1.0)

    def _prepared(self, preparation: Future[Sequence], stream: Stream) -> None:
        with self._lock:
            self._num_preprocessing -= 1
        if preparation.cancelled():
            stream.fail(EngineUnavailable("the engine has stopped"))  # ignored where the caller cancelled
        elif (error := preparation.exception()) is None:
            self._loop.add(preparation.result(), stream)
        elif isinstance(error, KestrelError):
            stream.fail(error)
        else:
            stream.fail(InternalError(error))

    def _cancel(self, preparation: Future[Sequence], stream: Stream) -> None:
        if not preparation.cancel():
            self._loop.cancel(stream)

    def _die(self) -> None:
        self._become(EngineStatus.DEAD)

    def _become(self, status: EngineStatus) -> None:
        if self._status in (status, EngineStatus.DEAD):
            return
        self._status = status
        for callback in self._callbacks:
            callback(status)
