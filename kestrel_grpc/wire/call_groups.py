"""The groups of methods of a server, each with its limits and its access rules; shared by all its frontends."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel_grpc.access.access import Access, OpenAccess
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.wire.call_admission import CallAdmission, Observer
from kestrel_grpc.wire.call_context import CANCELLED, DEADLINE_EXCEEDED, OK, CallContext, Outcome
from kestrel_grpc.wire.limits import (
    MAX_IMAGE_CALLS,
    MAX_SHORT_CALLS,
    MAX_STREAMS,
    MAX_WAITING_STREAMS,
    MAX_WATCHES,
    control_gate,
    max_calls,
    request_gate,
)
from kestrel_grpc.wire.message_gate import Gate, MessageGate, StreamGate
from kestrel_grpc.wire.open_calls import CancellableCalls, OpenCalls
from kestrel_grpc.wire.refusals import Refusals
from kestrel_runtime.api.engine import Engine


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
        self._open_calls, self._open_watches = OpenCalls(), OpenCalls()
        self.requests = CancellableCalls()
        """The open calls of `inference`."""
        self.inference = self._group(
            access, self._request_gate, max_calls(engine.info), observers, cancellable=self.requests
        )
        """Requests to the model."""
        self.streams = self._group(
            access,
            self._stream_gate,
            MAX_STREAMS,
            tuple(_of_failures(observe) for observe in observers),
            open_calls=self._open_watches,
            counts_calls=False,
        )
        """Streams of requests. Each request is a call of `inference` and is recorded there; a stream is recorded
        where it fails. Their connections count as idle while no request runs."""
        self.images = self._group(access, self._request_gate, MAX_IMAGE_CALLS, observers)
        """Images that the server keeps."""
        self.operations = self._group(access, self._short_gate, MAX_SHORT_CALLS, observers)
        """Which server this is, what it serves, how busy it is."""

    def health_checks(self) -> CallAdmission:
        """Health checks on one port. They need no token, and are not recorded: probes would fill the log."""
        return self._group(OpenAccess(), self._short_gate, MAX_SHORT_CALLS)

    def health_watches(self) -> CallAdmission:
        """Streams of health on one port. Their connections count as idle: a client opens the stream again."""
        return self._group(OpenAccess(), self._short_gate, MAX_WATCHES, open_calls=self._open_watches)

    def unrecorded(self, *, needs_token: bool) -> CallAdmission:
        """Questions about the schema, or for the metrics, on one port."""
        return self._group(self._access if needs_token else OpenAccess(), self._short_gate, MAX_SHORT_CALLS)

    def streams_are_crowded(self) -> bool:
        """Whether streams whose requests still run should not wait for more of them now."""
        return self._stream_gate.is_crowded

    def busy_ports(self) -> set[int]:
        """The remote ports of connections with open calls; streams of health do not count."""
        return self._open_calls.peer_ports()

    def close(self) -> None:
        """Receive no further request message. Calls whose message has not arrived end with `EngineUnavailable`."""
        self.refusals.close()
        self._request_gate.close()
        self._stream_gate.close()

    async def ended(self) -> None:
        """Wait until all calls that are open now have ended."""
        await self._open_calls.end()
        await self._open_watches.end()

    def _group(
        self,
        access: Access,
        gate: Gate,
        max_calls: int,
        observers: Sequence[Observer] = (),
        open_calls: OpenCalls | None = None,
        cancellable: CancellableCalls | None = None,
        *,
        counts_calls: bool = True,
    ) -> CallAdmission:
        return CallAdmission(
            self._engine,
            access,
            gate,
            max_calls,
            open_calls or self._open_calls,
            self.refusals,
            observers,
            cancellable,
            stream_idle_timeout_s=self._config.stream_idle_timeout,
            counts_calls=counts_calls,
        )


def _of_failures(observe: Observer) -> Observer:
    """The observer of streams: their requests are recorded on their own, and so is that the caller ended them."""

    def observe_failure(call: CallContext, outcome: Outcome) -> None:
        if outcome not in (OK, CANCELLED, DEADLINE_EXCEEDED):
            observe(call, outcome)

    return observe_failure
