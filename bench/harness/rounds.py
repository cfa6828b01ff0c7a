"""Loads several servers in turns, so that what else the machine does meets all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bench.harness.load import LoadProcesses
from bench.harness.summary import Row, summarise
from bench.harness.workload import WORKLOADS, Workload
from kestrel_grpc.cli.bench.numbers import Objective

_FIRST_ANSWERS_S = 90.0
_OBJECTIVE = Objective(first_token_ms=1000.0, per_token_ms=50.0)


class Load(NamedTuple):
    """What is asked, and how many requests run at once."""

    workload: Workload
    concurrency: int

    @classmethod
    def of(cls, text: str) -> Load:
        """From `workload:concurrency`. Raises ValueError or KeyError."""
        name, concurrency = text.split(":")
        return cls(WORKLOADS[name], int(concurrency))

    def __str__(self) -> str:
        return f"{self.workload.name}, {self.concurrency} at once"


def ask_once(load: Load, processes: Mapping[str, LoadProcesses]) -> None:
    """What is compiled or captured at its first use belongs to no row."""
    for own in processes.values():
        own.closed(load.workload, load.concurrency, 0.1, _FIRST_ANSWERS_S)


def rounds(
    load: Load, processes: Mapping[str, LoadProcesses], num_rounds: int, window_s: float, warm_up_s: float
) -> Iterator[tuple[str, Row]]:
    """Each server's name and row, in turns, every other one in the opposite order. `processes`: those that load a
    server, by its name.

    Raises RuntimeError where calls fail.
    """
    for number in range(num_rounds):
        for name, own in list(processes.items())[:: -1 if number % 2 else 1]:
            recording = own.closed(load.workload, load.concurrency, window_s, warm_up_s)
            tokens = load.workload.num_tokens
            row = summarise(load.workload.name, load.concurrency, recording, tokens, _OBJECTIVE, is_open=False)
            if row.errors:
                raise RuntimeError(f"{name}, {load}: {row.errors}")
            yield name, row
