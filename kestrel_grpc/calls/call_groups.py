"""The groups of methods of a server, each with its limits and its access rules; shared by all its frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kestrel_grpc.access.access import Access, OpenAccess
from kestrel_grpc.calls.call_admission import CallAdmission, Observer
from kestrel_grpc.calls.call_context import CANCELLED, DEADLINE_EXCEEDED, OK, CallContext, Outcome
from kestrel_grpc.calls.message_gate import Gate, GateLimits, MessageGate, StreamGate
from kestrel_grpc.calls.refusals import Refusals
from kestrel_grpc.config.options import ServerConfig
from kestrel_runtime.api.engine import Engine, EngineInfo

MAX_SHORT_CALLS = 256
"""Open calls of each kind that is answered at once: health checks, reflection, `EngineService`."""
MAX_IMAGE_CALLS = 256
"""Open calls of `ImageService`."""
MAX_STREAMS = 256
"""Open streams of requests. Each request of a stream is a call as well."""
MAX_WAITING_STREAMS = 32
"""Streams of requests that wait for their next message, each of which may be of the largest size."""
MAX_WATCHES = 1024
"""Open streams of health."""
_CONTROL_PLACES, _CONTROL_FAST_PLACES = 1, 1
_CONTROL_TIMEOUT_S = 2.0
# For callers that still read their answers, or wait for a place for their message.
_CALLS_BEYOND_ENGINE = 512


class CallGroups:
    """Belongs to the event loop that it was made on. `observers` record inference and operations, not health."""

    def __init__(self, engine: Engine, config: ServerConfig, access: Access, observers: Sequence[Observer]) -> None:
        self._engine = engine
        self._config = config
        self._access = access
        self._request_gate = MessageGate(request_gate(config))
        self._short_gate = MessageGate(control_gate(config))
        self._stream_gate = StreamGate(MAX_WAITING_STREAMS)
        self.refusals = Refusals()
        """Of all groups."""
        self._groups: list[CallAdmission] = []
        self.inference = self._group(access, self._request_gate, _max_calls(engine.info), observers)
        """Requests to the model."""
        self.streams = self._group(
            access,
            self._stream_gate,
            MAX_STREAMS,
            tuple(_of_failures(observe) for observe in observers),
            counts_calls=False,
            keeps_connections=False,
        )
        """Streams of requests. Each request is a call of `inference` and is recorded there; a stream is recorded
        only if it fails. The connection of a stream counts as idle while none of its requests runs."""
        self.images = self._group(access, self._request_gate, MAX_IMAGE_CALLS, observers)
        """Images that the server keeps."""
        self.operations = self._group(access, self._short_gate, MAX_SHORT_CALLS, observers)
        """Identity, model and load of the server."""

    def health_checks(self) -> CallAdmission:
        """Health checks on one port. They need no token, and are not recorded: probes would fill the log."""
        return self._group(OpenAccess(), self._short_gate, MAX_SHORT_CALLS)

    def health_watches(self) -> CallAdmission:
        """Streams of health on one port. Their connections count as idle: a client opens the stream again."""
        return self._group(OpenAccess(), self._short_gate, MAX_WATCHES, keeps_connections=False)

    def unrecorded(self, *, needs_token: bool) -> CallAdmission:
        """Questions about the schema, or for the metrics, on one port."""
        return self._group(self._access if needs_token else OpenAccess(), self._short_gate, MAX_SHORT_CALLS)

    def streams_are_crowded(self) -> bool:
        """True if a stream with running requests should not wait for another request now."""
        return self._stream_gate.is_crowded

    def busy_ports(self) -> set[int]:
        """The remote ports of connections that have open calls and do not count as idle."""
        calls = (call for group in self._groups if group.keeps_connections for call in group.open_calls.values())
        ports = (call.peer().rpartition(":")[2] for call in calls)
        return {int(port) for port in ports if port.isdecimal()}

    def close(self) -> None:
        """Receive no further request message. Calls whose message has not arrived end with `EngineUnavailable`."""
        self.refusals.close()
        self._request_gate.close()
        self._stream_gate.close()

    async def ended(self) -> None:
        """Wait until all calls that are open now have ended."""
        tasks = [task for group in self._groups for task in group.open_calls]
        if tasks:
            await asyncio.wait(tasks)

    def _group(
        self,
        access: Access,
        gate: Gate,
        max_calls: int,
        observers: Sequence[Observer] = (),
        *,
        counts_calls: bool = True,
        keeps_connections: bool = True,
    ) -> CallAdmission:
        group = CallAdmission(
            self._engine,
            access,
            gate,
            max_calls,
            self.refusals,
            observers,
            stream_idle_timeout_s=self._config.stream_idle_timeout,
            counts_calls=counts_calls,
            keeps_connections=keeps_connections,
        )
        self._groups.append(group)
        return group


def _max_calls(info: EngineInfo) -> int:
    """Calls of `VisionService` at a time: twice what the engine holds, since a tenant gets no more than half."""
    return 2 * (info.config.max_queued_requests + info.max_batch_size) + _CALLS_BEYOND_ENGINE


def request_gate(config: ServerConfig) -> GateLimits:
    """For messages that may hold an image. With those of `control_gate` they fit into `max_receiving_bytes`."""
    num_places = config.max_receiving_bytes // config.max_message_bytes - _CONTROL_PLACES - _CONTROL_FAST_PLACES
    num_short = max(1, num_places // 3)
    return GateLimits(
        places=max(1, num_places - num_short), short_places=num_short, timeout_s=config.receive_timeout
    )


def control_gate(config: ServerConfig) -> GateLimits:
    """For messages that arrive together with their headers: those of health, reflection and `EngineService`."""
    return GateLimits(
        places=_CONTROL_PLACES,
        short_places=_CONTROL_FAST_PLACES,
        timeout_s=min(_CONTROL_TIMEOUT_S, config.receive_timeout),
        wait_limit_s=0.05,
    )


def _of_failures(observe: Observer) -> Observer:
    """The observer of streams. Their requests are recorded separately, also when the caller ends the stream."""

    def observe_failure(call: CallContext, outcome: Outcome) -> None:
        if outcome not in (OK, CANCELLED, DEADLINE_EXCEEDED):
            observe(call, outcome)

    return observe_failure
