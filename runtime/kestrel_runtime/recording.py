"""Work recorded as a CUDA graph. Knows nothing of what is recorded, nor of who replays it when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NUM_REHEARSALS = 2


class Recording(NamedTuple):
    """A graph that does `run` again when replayed, and where its result then stands."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    @classmethod
    def of(cls, run: Callable[[], Tensor], pool: Any) -> Recording:
        """Rehearse `run`, then record it with memory from `pool`, as torch hands it out. Waits for the device."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compilers and libraries allocate on first use, which no recording allows
            for _ in range(_NUM_REHEARSALS):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
        return cls(graph, result)

    def replayed(self) -> Tensor:
        """Do it again; a copy of the result, whose place the next replay writes."""
        self.graph.replay()
        return self.result.clone()
