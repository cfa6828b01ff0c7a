"""Many calls at a time: jobs, their outcomes in order, and progress. The clients make the calls.

A failed job does not stop the others, unless its arguments are ones that no call takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from kestrel_client.errors import KestrelClientError
from kestrel_client.images import ImageInput
from kestrel_client.results import Result

if TYPE_CHECKING:
    from kestrel_client.aio import AsyncClient
    from kestrel_client.client import Client

DEFAULT_CONCURRENCY = 16
Skill = Literal["query", "caption", "point", "detect", "segment", "gaze", "chat", "embed"]
"""The skill that a job asks for."""

# Of the skills that are streamed as text, the method for a whole answer.
_METHODS = {"query": "complete_query", "caption": "complete_caption", "chat": "complete_chat"}
# A job waits for a place in the queue of the server for as long as its call may take.
_MAX_RETRY_S = 1e9


class Job:
    """One call of a batch, such as `Job("detect", "bird.jpg", "bird", max_objects=10)`.

    Args:
        skill: The name of the skill.
        image: The image; None for a query without one, and for a conversation.
        *arguments: What the method of the client takes after the image; of a conversation, its messages.
        is_streamed: Whether the answer of a query, a caption or a conversation is asked for as a stream, which is
            read to its end.
        **options: What it takes by keyword.

    Raises:
        ValueError: For a skill that does not exist, or whose answers are not streamed as text.
    """

    __slots__ = ("arguments", "image", "is_streamed", "options", "skill")

    def __init__(
        self, skill: Skill, image: ImageInput | None, /, *arguments: Any, is_streamed: bool = False, **options: Any
    ) -> None:
        if skill not in get_args(Skill):
            raise ValueError(f"the skill of a job is one of {', '.join(get_args(Skill))}, not {str(skill)[:40]!r}")
        if skill == "chat" and image is not None:
            raise ValueError("the images of a conversation are in its messages")
        if is_streamed and skill not in _METHODS:
            raise ValueError(f"the stream of a job is that of {' or '.join(_METHODS)}, not of {skill}")
        self.skill: Skill = skill
        self.image = image
        self.arguments = arguments
        self.is_streamed = is_streamed
        self.options = options

    def call(self, client: Client | AsyncClient) -> Any:
        """Makes the call. Returns its result; with the asyncio client, the coroutine of it."""
        method = getattr(client, self.skill if self.is_streamed else _METHODS.get(self.skill, self.skill))
        about = () if self.skill == "chat" else (self.image,)
        made = method(*about, *self.arguments, **{"max_retry_s": _MAX_RETRY_S, **self.options})
        return made.result() if self.is_streamed else made


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job: its `result`, or else the `error` of its call or of the file of its image."""

    job: Job
    result: Result | None
    error: KestrelClientError | OSError | None


@dataclass(frozen=True, slots=True)
class Progress:
    """The number of jobs that have ended, failed ones included.

    `total_count` is None where the jobs have no length.
    """

    done_count: int
    failed_count: int
    total_count: int | None


def blocking_map(
    client: Client, jobs: Iterable[Job], concurrency: int, on_progress: Callable[[Progress], object] | None
) -> Generator[Outcome, None, None]:
    """Yields the outcomes in the order of the jobs. Raises ValueError for a concurrency below 1."""
    batch = _Batch(jobs, concurrency, on_progress)

    def outcome(job: Job) -> Outcome:
        try:
            return Outcome(job, job.call(client), None)
        except (KestrelClientError, OSError) as error:
            return Outcome(job, None, error)

    def outcomes() -> Generator[Outcome, None, None]:
        running: dict[Future[Outcome], int] = {}
        pool = ThreadPoolExecutor(concurrency, "kestrel-map")
        try:
            while True:
                for number, job in batch.next_jobs(concurrency - len(running)):
                    running[pool.submit(outcome, job)] = number
                yield from batch.ready()
                if not running:
                    return
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    batch.end(running.pop(ended), ended.result())
        finally:
            pool.shutdown(cancel_futures=True)

    return outcomes()


def async_map(
    client: AsyncClient, jobs: Iterable[Job], concurrency: int, on_progress: Callable[[Progress], object] | None
) -> AsyncGenerator[Outcome, None]:
    """Yields the outcomes in the order of the jobs. Cancels calls that run when the iterator is closed.

    Raises ValueError for a concurrency below 1."""
    batch = _Batch(jobs, concurrency, on_progress)

    async def outcome(job: Job) -> Outcome:
        try:
            return Outcome(job, await job.call(client), None)
        except (KestrelClientError, OSError) as error:
            return Outcome(job, None, error)

    async def outcomes() -> AsyncGenerator[Outcome, None]:
        running: dict[asyncio.Task[Outcome], int] = {}
        try:
            while True:
                for number, job in batch.next_jobs(concurrency - len(running)):
                    running[asyncio.create_task(outcome(job))] = number
                for ready in batch.ready():
                    yield ready
                if not running:
                    return
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    batch.end(running.pop(task), task.result())
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    return outcomes()


class _Batch:
    """The state of a batch: the jobs that begin next, and the outcomes that may be returned in the order of the
    jobs."""

    def __init__(
        self, jobs: Iterable[Job], concurrency: int, on_progress: Callable[[Progress], object] | None
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is at least 1, not {concurrency}")
        self._jobs = enumerate(jobs)
        self._total_count = len(jobs) if isinstance(jobs, Sized) else None
        self._on_progress = on_progress
        self._ended: dict[int, Outcome] = {}
        self._returned_count = 0
        self._done_count = 0
        self._failed_count = 0

    def next_jobs(self, count: int) -> Iterator[tuple[int, Job]]:
        """Yields at most `count` further jobs, with their numbers."""
        for _ in range(count):
            numbered = next(self._jobs, None)
            if numbered is None:
                return
            yield numbered

    def end(self, number: int, outcome: Outcome) -> None:
        """Notes that a job has ended."""
        self._ended[number] = outcome
        self._done_count += 1
        self._failed_count += outcome.error is not None
        if self._on_progress is not None:
            self._on_progress(Progress(self._done_count, self._failed_count, self._total_count))

    def ready(self) -> Iterator[Outcome]:
        """Yields the outcomes that are next in the order of the jobs."""
        while (outcome := self._ended.pop(self._returned_count, None)) is not None:
            self._returned_count += 1
            yield outcome
