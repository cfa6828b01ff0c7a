"""Asks a server over gRPC the questions of `workload.py`, with the load generator of `kestrel-grpc bench`."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from bench.harness.workload import Album, Workload
from kestrel_grpc.cli.bench.calls import Caller, Question, Target
from kestrel_grpc.cli.bench.loops import Sample
from kestrel_grpc.cli.bench.processes import LoadProcesses as Processes


@dataclass(frozen=True, slots=True)
class Questions:
    """What makes the requests of a workload; they name the adapters in turn."""

    num_pictures: int
    """Drawings of each process."""
    adapters: tuple[str, ...]
    num_processes: int
    names_images: bool = False

    def __call__(self) -> Callable[[Workload, int], Question]:
        """Draw the pictures."""
        album = Album(self.num_pictures)

        def question(workload: Workload, number: int) -> Question:
            turn = number // self.num_processes
            return Question(
                "query",
                workload.question(number),
                album.picture(workload, number),
                workload.num_tokens,
                0.0,
                workload.is_streamed,
                self.adapters[turn % len(self.adapters)] if self.adapters else "",
                self.names_images,
            )

        return question


class _InTurns(Caller):
    """Sends each request over the next of several connections."""

    def __init__(self, callers: Sequence[Caller]) -> None:
        self._callers = itertools.cycle(callers)

    async def call(self, question: Question, started: float, timeout_s: float) -> Sample:
        return await next(self._callers).call(question, started, timeout_s)


@dataclass(frozen=True)
class SpreadTarget(Target):
    """A server that each process has several connections to."""

    num_connections: int = 1

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Caller]:
        async with contextlib.AsyncExitStack() as stack:
            connecting = (stack.enter_async_context(Target.connected(self)) for _ in range(self.num_connections))
            yield _InTurns([await each for each in connecting])


class LoadProcesses(Processes[Workload]):
    """Several processes that load one server together with workloads.

    The requests name the given adapters in turn; none where there are none. Pictures are known by the numbers of
    requests, which begin with `first_number`: two who load one server begin far from each other. With
    `names_images`, the metadata of a request tells a balancer which picture it shows. Each process uses
    `num_connections` in turns: a connection stays with the front end that the kernel has given it, so that only
    many of them spread evenly.
    """

    def __init__(
        self,
        address: str,
        num_processes: int,
        num_pictures: int,
        adapters: tuple[str, ...] = (),
        first_number: int = 0,
        *,
        names_images: bool = False,
        num_connections: int = 1,
    ) -> None:
        questions = Questions(num_pictures, adapters, num_processes, names_images)
        target = SpreadTarget("grpc", address, num_connections=num_connections)
        super().__init__(target, questions, num_processes, first_number=first_number)
