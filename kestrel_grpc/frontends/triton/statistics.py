"""Counts the requests to the model and their time, as Triton's `ModelStatistics` reports them."""

from __future__ import annotations

import time

from kestrel_grpc.frontends.triton.model import MODEL, VERSION
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_grpc.wire.call_context import CallContext, Outcome


class Statistics:
    """Of the requests of all frontends. Belongs to the event loop of the calls."""

    def __init__(self) -> None:
        self._stats = wire.ModelStatistics(name=MODEL, version=VERSION)

    def record(self, call: CallContext, outcome: Outcome) -> None:
        """Count a call that has ended, if it was a request."""
        if call.request is None:
            return
        stats, times = self._stats, self._stats.inference_stats
        _add(times.success if outcome.is_ok else times.fail, call.duration_s)
        if not outcome.is_ok or call.finished is None:
            return
        timing = call.finished.timing
        stats.last_inference = time.time_ns() // 1_000_000
        stats.inference_count += 1
        stats.execution_count += 1
        _add(times.queue, timing.queue_s)
        _add(times.compute_input, timing.preprocess_s)
        _add(times.compute_infer, timing.prefill_s + timing.decode_s)
        _add(times.compute_output, 0.0)

    def report(self, name: str) -> wire.ModelStatisticsResponse:
        """The statistics, under the name that a caller uses."""
        response = wire.ModelStatisticsResponse(model_stats=[self._stats])
        response.model_stats[0].name = name
        return response


def _add(total: wire.StatisticDuration, duration_s: float) -> None:
    total.count += 1
    total.ns += round(duration_s * 1e9)
