"""Counts the requests of Triton's clients and their time, for `ModelStatistics`.

They are not read from the metrics, which lack the time of successful requests alone and the moment of the last
answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.frontends.triton.model import MODEL, VERSION
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire


class Statistics:
    """Counts the requests that Triton's clients send to this process. Belongs to the event loop of the calls."""

    def __init__(self) -> None:
        self._stats = wire.ModelStatistics(name=MODEL, version=VERSION)

    @contextmanager
    def counting(self, call: CallContext) -> Iterator[None]:
        """Counts the request that the block serves: as failed if an error or a cancellation ends the block.

        A call that fails before its request is known (`call.request` is None) is not counted.
        """
        try:
            yield
        except (Exception, asyncio.CancelledError):
            if call.request is not None:
                _add(self._stats.inference_stats.fail, call.duration_s)
            raise
        self._count_success(call)

    def _count_success(self, call: CallContext) -> None:
        assert call.finished is not None, "an answered request has ended"
        timing, stats = call.finished.timing, self._stats
        stats.last_inference = time.time_ns() // 1_000_000
        stats.inference_count += 1
        stats.execution_count += 1
        times = stats.inference_stats
        _add(times.success, call.duration_s)
        _add(times.queue, timing.queue_s)
        _add(times.compute_input, timing.preprocess_s)
        _add(times.compute_infer, timing.prefill_s + timing.decode_s)
        _add(times.compute_output, 0.0)

    def serialized(self) -> bytes:
        """Returns the counts as a serialized `ModelStatistics`, for `report` of another process."""
        return self._stats.SerializeToString()

    def report(self, name: str, others: Iterable[bytes]) -> wire.ModelStatisticsResponse:
        """Returns the sum of these counts and those of `others`, for the model name that the caller used.

        `others` are serialized `ModelStatistics` of other processes.
        """
        total = wire.ModelStatistics()
        total.CopyFrom(self._stats)
        total.name = name
        for counted in others:
            _add_statistics(total, wire.ModelStatistics.FromString(counted))
        return wire.ModelStatisticsResponse(model_stats=[total])


def _add_statistics(total: wire.ModelStatistics, part: wire.ModelStatistics) -> None:
    total.last_inference = max(total.last_inference, part.last_inference)
    total.inference_count += part.inference_count
    total.execution_count += part.execution_count
    for field, duration in part.inference_stats.ListFields():
        sums = getattr(total.inference_stats, field.name)
        sums.count += duration.count
        sums.ns += duration.ns


def _add(total: wire.StatisticDuration, duration_s: float) -> None:
    total.count += 1
    total.ns += round(duration_s * 1e9)
