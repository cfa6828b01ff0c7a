"""Reports the load of the server to balancers with each answer: ORCA's report in the trailing metadata of a
call."""

from __future__ import annotations

import time

from kestrel_grpc.frontends.grpc.orca.orca_load_report_pb2 import OrcaLoadReport
from kestrel_runtime.api.engine import Engine

LOAD_REPORT_KEY = "endpoint-load-metrics-bin"

_MIN_CPU_WINDOW_S = 1.0


class LoadReports:
    """Makes the load reports of a server; `proto/compat/xds` describes them. Belongs to the event loop of the
    calls."""

    def __init__(self, engine: Engine, num_processors: float) -> None:
        """`num_processors` is the processor time that this process may use, in seconds per second."""
        self._engine = engine
        self._max_running = engine.info.max_batch_size * len(engine.cores())
        self._processors = _ProcessorUse(num_processors)

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Returns the report for a call whose request the engine has just finished."""
        load = self._engine.load()
        # The request of the call has left the engine, and is part of the load all the same.
        num_requests = 1 + load.num_running + load.num_waiting + load.num_preprocessing
        report = OrcaLoadReport(
            cpu_utilization=self._processors.utilization(),
            application_utilization=num_requests / self._max_running,
            rps_fractional=load.requests_per_second,
            named_metrics={
                "kv_cache_utilization": load.num_used_pages / load.num_pages if load.num_pages else 0.0,
                "running_request_count": load.num_running,
                "waiting_request_count": load.num_waiting,
                "preprocessing_request_count": load.num_preprocessing,
                "output_tokens_per_second": load.tokens_per_second,
            },
        )
        return ((LOAD_REPORT_KEY, report.SerializeToString()),)


class _ProcessorUse:
    """Measures the use of processors by this process, at most once in `_MIN_CPU_WINDOW_S` seconds."""

    def __init__(self, num_processors: float) -> None:
        self._num_processors = num_processors
        self._since = time.monotonic(), time.process_time()
        self._utilization = 0.0

    def utilization(self) -> float:
        """Returns the used share of the processor time, from 0 to 1, between the last two measurements."""
        now_s, used_s = time.monotonic(), time.process_time()
        window_s = now_s - self._since[0]
        if window_s >= _MIN_CPU_WINDOW_S:
            self._utilization = (used_s - self._since[1]) / window_s / self._num_processors
            self._since = now_s, used_s
        return self._utilization
