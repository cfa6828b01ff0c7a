"""Builds the groups of methods of a server, each with its limits and its access rules; all frontends share them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kestrel_grpc.access.access import Access, OpenAccess
from kestrel_grpc.calls.call_admission import CallAdmission, Observer
from kestrel_grpc.calls.call_context import CANCELLED, DEADLINE_EXCEEDED, OK, CallContext, Outcome
from kestrel_grpc.calls.frame_counts import FrameCounts
from kestrel_grpc.calls.message_gate import FrameGate, Gate, GateLimits, MessageGate, StreamGate, UploadGate
from kestrel_grpc.calls.refusals import Refusals
from kestrel_grpc.calls.usage import Usage
from kestrel_grpc.config.options import ServerConfig
from kestrel_runtime.api.engine import Engine, EngineInfo

MAX_SHORT_CALLS = 256
"""The open calls of each kind that is answered at once: health checks, reflection, `EngineService`."""
MAX_IMAGE_CALLS = 256
"""The open calls of `ImageService`."""
MAX_UPLOADS = 4
"""The adapters that are uploaded at a time."""
MAX_STREAMS = 256
"""The open streams of requests. Each request of a stream is a call as well."""
MAX_WAITING_STREAMS = 32
"""The streams of requests that wait for their next message, each of which may be of the largest size."""
MAX_WATCHES = 1024
"""The open streams of health."""
_CONTROL_PERMITS, _CONTROL_SHORT_PERMITS = 1, 1
_CONTROL_TIMEOUT_S = 2.0
# Additional calls, whose callers still read their answers or whose message has not been received.
_CALLS_BEYOND_ENGINE = 512


class CallGroups:
    """Holds the groups of a server. `observers` record inference and operations, not health. Belongs to one event
    loop."""

    def __init__(self, engine: Engine, config: ServerConfig, access: Access, observers: Sequence[Observer]) -> None:
        self._engine = engine
        self._config = config
        self._access = access
        self._request_gate = MessageGate(request_gate(config))
        self._control_gate = MessageGate(control_gate(config))
        self._stream_gate = StreamGate(MAX_WAITING_STREAMS)
        self._frame_gate = FrameGate(config.stream_idle_timeout)
        self._upload_gate = UploadGate(MAX_UPLOADS)
        self.refusals = Refusals()
        """The delays of refusals, shared by all groups."""
        self.usage = Usage()
        """The counts of requests to the model, by caller."""
        self.frames_seen = FrameCounts()
        """The counts of frames."""
        requests = (*observers, self.usage.record)
        failures = tuple(_record_failures(observe) for observe in requests)
        self._groups: list[CallAdmission] = []
        self.inference = self._group(access, self._request_gate, _max_calls(engine.info), requests)
        """The group of requests to the model."""
        self.streams = self._group(
            access,
            self._stream_gate,
            MAX_STREAMS,
            failures,
            counts_calls=False,
            keeps_connections=False,
        )
        """The group of streams of requests.

        Each request of a stream is a call of `inference` and is recorded there; a stream is recorded only if it
        fails. The connection of a stream counts as idle while none of its requests runs.
        """
        self.frames = self._group(access, self._frame_gate, max(1, config.max_frame_streams), failures)
        """The group of streams of frames.

        As in `streams`, each frame is a call of `inference`; but the stream holds the place of its frames among the
        concurrent calls of its token.
        """
        self.images = self._group(access, self._request_gate, MAX_IMAGE_CALLS, observers)
        """The group of calls about stored images."""
        self.operations = self._group(access, self._control_gate, MAX_SHORT_CALLS, observers)
        """The group of calls about identity, model and load of the server."""
        self.uploads = self._group(access, self._upload_gate, MAX_SHORT_CALLS, observers)
        """The group of uploads of adapters."""

    def health_checks(self) -> CallAdmission:
        """Returns a new group for health checks on one port.

        Health checks need no token, and are not recorded: probes would fill the log.
        """
        return self._group(OpenAccess(), self._control_gate, MAX_SHORT_CALLS)

    def health_watches(self) -> CallAdmission:
        """Returns a new group for streams of health on one port.

        Their connections count as idle: a client reopens such a stream.
        """
        return self._group(OpenAccess(), self._control_gate, MAX_WATCHES, keeps_connections=False)

    def unrecorded(self, *, needs_token: bool) -> CallAdmission:
        """Returns a new group for calls that read the schema or the metrics on one port."""
        return self._group(self._access if needs_token else OpenAccess(), self._control_gate, MAX_SHORT_CALLS)

    def cancel(self, selects: Callable[[CallContext], bool]) -> int:
        """Cancels the selected requests to the model and streams of frames; returns their number."""
        return self.inference.cancel(selects) + self.frames.cancel(selects)

    def streams_are_crowded(self) -> bool:
        """True if a stream with running requests should not wait for another request now."""
        return self._stream_gate.is_crowded

    def busy_ports(self) -> set[int]:
        """Returns the remote ports of connections that have open calls and do not count as idle."""
        calls = (call for group in self._groups if group.keeps_connections for call in group.open_calls.values())
        ports = (call.peer().rpartition(":")[2] for call in calls)
        return {int(port) for port in ports if port.isdecimal()}

    def close(self) -> None:
        """Stops receiving request messages. Calls whose message has not arrived end with `EngineUnavailable`."""
        self.refusals.close()
        self._request_gate.close()
        self._stream_gate.close()
        self._frame_gate.close()
        self._upload_gate.close()

    async def ended(self) -> None:
        """Waits until all calls that are open now have ended."""
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
    """Returns the limit of open inference calls: twice what the engine holds, since a tenant gets no more than
    half."""
    return 2 * (info.config.max_queued_requests + info.max_batch_size) + _CALLS_BEYOND_ENGINE


def request_gate(config: ServerConfig) -> GateLimits:
    """Returns the limits for messages that may hold an image.

    Together with the messages of `control_gate` they fit into `max_receiving_bytes`.
    """
    num_permits = config.max_receiving_bytes // config.max_message_bytes - _CONTROL_PERMITS - _CONTROL_SHORT_PERMITS
    num_short = max(1, num_permits // 3)
    return GateLimits(
        permits=max(1, num_permits - num_short), short_permits=num_short, timeout_s=config.receive_timeout
    )


def control_gate(config: ServerConfig) -> GateLimits:
    """Returns the limits for messages that arrive together with their headers: health, reflection and
    `EngineService`."""
    return GateLimits(
        permits=_CONTROL_PERMITS,
        short_permits=_CONTROL_SHORT_PERMITS,
        timeout_s=min(_CONTROL_TIMEOUT_S, config.receive_timeout),
        wait_limit_s=0.05,
    )


def _record_failures(observe: Observer) -> Observer:
    """Returns the observer of streams, which records failures.

    Requests of a stream are recorded separately, also if the caller ends the stream.
    """

    def observe_failure(call: CallContext, outcome: Outcome) -> None:
        if outcome not in (OK, CANCELLED, DEADLINE_EXCEEDED):
            observe(call, outcome)

    return observe_failure
