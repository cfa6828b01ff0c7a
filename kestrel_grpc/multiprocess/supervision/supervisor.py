"""Supervises front ends and engine cores: starts them, restarts those that end, and ends all of them in order.

    start     reserve the ports ── start all processes ── all cores have loaded ── front ends listen ── announce
    life      a process ends → the others are notified → it is started again, at once or after a pause
    SIGTERM   withdraw ── wait ── front ends drain and exit ── cores exit          a second signal: all exit now

Each child has one task, `_Child.keep`, which runs its processes one after the other. The supervisor handles no
request and imports no torch: it must live when others do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from setproctitle import setproctitle

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.protocol.errors import SupervisorUnavailable
from kestrel_grpc.multiprocess.protocol.link import Link, send_first
from kestrel_grpc.multiprocess.supervision.child import OTHER_BUILD, STOP_SIGNALS
from kestrel_grpc.multiprocess.supervision.folder import private_folder, touch
from kestrel_grpc.multiprocess.supervision.layout import CorePlace, Layout, placed
from kestrel_grpc.multiprocess.supervision.metrics import joined
from kestrel_grpc.multiprocess.supervision.sharing import Owner
from kestrel_grpc.process.exit import END_TIMEOUT_S
from kestrel_grpc.process.free_ports import address_of, reserved_port
from kestrel_grpc.process.resources import freeze_existing_objects, loop_factory
from kestrel_grpc.process.signals import stop_signals
from kestrel_grpc.telemetry.logs import log_end
from kestrel_grpc.telemetry.metrics import Reading, new_registry, not_ready_text

if TYPE_CHECKING:
    from kestrel_grpc.frontends.http.probes import ProbePort

PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 30.0
"""The time without an answer to a ping after which a process is killed."""
MAX_PAUSE_S = 60.0
"""The longest pause before a process is started again."""
WELL_S = 60.0
"""The time of service after which the next pause is the shortest again."""
_METRICS_TIMEOUT_S = 5.0
_LAST_S = 10.0
"""The time that a front end has to exit after its drain timeout, or after `Stop`."""
_REAP_INTERVAL_S = 5.0
LOOK_INTERVAL_S = 5.0
"""The time between two checks that the private folder is still there."""
_LOOKS_TO_TOUCH = 720
"""The checks after which the files of the folder are touched, so that they look new."""

_log = logging.getLogger(__name__)


class StartFailed(Exception):
    """Raised if the server cannot start; `status` is its exit status."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status if status > 0 else 1


class _CannotStart(Exception):
    """Raised if the system does not start a process; the message gives the reason."""


def supervise(config: ServerConfig, layout: Layout) -> int:
    """Run a server of several processes until a signal; returns the exit status.

    Raises `PortUnavailable` and `NoPrivateFolder`.
    """
    setproctitle("kestrel-grpc supervisor")
    with private_folder() as (folder, lock), asyncio.Runner(loop_factory=loop_factory()) as runner:

        async def run() -> int:
            return await Supervisor(config, layout, folder, lock).serve()

        return runner.run(run())


class Supervisor:
    """The children of a server and the state that they share. Belongs to the event loop that `serve` runs on."""

    def __init__(self, config: ServerConfig, layout: Layout, folder: Path, lock: int) -> None:
        """`folder` is private to the server; processes inherit `lock`, the descriptor of its lock."""
        self.folder = folder
        self.lock = lock
        self.config = config
        self.instance_id = secrets.token_hex(8)
        self.num_cores = len(layout.cores)
        self.num_frontends = layout.num_frontends
        self.is_ending = False
        """True once processes that end are not started again."""
        self.must_end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason why no process can be started again; the server then ends, to be restarted from outside."""
        self._is_withdrawn = False
        self._no_core_serves = asyncio.Event()
        """Set while all cores that have served are gone."""
        self.owner = Owner(folder, config.store_limits(), self._links_to_cores, self.metrics)
        """The owner of the state that the front ends share."""
        self._restarts: Counter[str] = Counter()
        self._registry = new_registry(self._read)
        self._cores = [_Core(self, index, place) for index, place in enumerate(layout.cores)]
        self._frontends = [_Frontend(self, index) for index in range(layout.num_frontends)]
        for child in self._children:
            self._restarts[child.name] = 0
        self._reservations: list[socket.socket] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._probe_port: ProbePort | None = None

    @cached_property
    def build(self) -> str:
        """Returns the digest of the code that every process must run. Read first once a process is on its way."""
        return messages.build_id()

    def end_because(self, reason: str) -> None:
        """End the server, for the first reason that is given."""
        if not self.must_end.done():
            self.must_end.set_result(reason)

    def require_start(self, status: int) -> None:
        """End the server if no process can replace one that ended with this status."""
        if status == OTHER_BUILD:
            self.end_because("the installed package is another than the one that the server was started with")
        self.require_folder()

    def require_folder(self) -> None:
        """End the server if its folder was removed."""
        if not os.path.isdir(self.folder):
            self.end_because(f"the folder {self.folder} was removed")

    @property
    def _children(self) -> Sequence[_Child]:
        return (*self._cores, *self._frontends)

    async def serve(self) -> int:
        """Run until a signal; returns the exit status. Raises `PortUnavailable`."""
        began, end = time.monotonic(), "the start has failed"
        with stop_signals(lambda: self._notify_frontends(messages.ReadAgain())) as signals:
            try:
                self._reserve_ports()
                starting = asyncio.ensure_future(self._start())
                await asyncio.wait((starting, signals.first), return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():  # no caller is served yet
                    starting.cancel()
                    number = signals.first.result()
                    end = f"{number.name} during the start"
                    return 0 if number is signal.SIGTERM else 128 + number
                starting.result()
                await asyncio.wait((signals.first, self.must_end), return_when=asyncio.FIRST_COMPLETED)
                has_signal = signals.first.done()
                end = signals.first.result().name if has_signal else self.must_end.result()
                if not has_signal:
                    _log.error("%s: the server ends, to be started again", self.must_end.result())
                # The others come from a terminal, where no load balancer has to notice.
                delay_s = self.config.withdrawal_delay
                if has_signal and signals.first.result() is not signal.SIGTERM:
                    delay_s = 0.0
                leaving = asyncio.ensure_future(self._leave(delay_s))
                await asyncio.wait((leaving, signals.second), return_when=asyncio.FIRST_COMPLETED)
                if not leaving.done():
                    _log.warning("stopping at once")
                    leaving.cancel()
                    end = f"{signals.second.result().name} while calls were ending"
                return 0 if has_signal else 1
            except StartFailed as error:
                end = str(error)
                _log.error("%s", error)
                return error.status
            finally:
                await self._stop()
                log_end(end, began=began)

    async def metrics(self) -> bytes:
        """Returns the metrics of all processes, without those that do not answer."""
        asked = [child for child in self._children if child.link is not None and child.is_ready]
        texts = await asyncio.gather(*(child.read_metrics() for child in asked))
        parts = [("process", "supervisor", generate_latest(self._registry))]
        parts += [(*child.label, text) for child, text in zip(asked, texts, strict=True)]
        parts += [(*core.label, not_ready_text()) for core in self._cores if core not in asked]
        return joined(parts)

    def ready_cores(self) -> frozenset[int]:
        """Returns the indices of the cores that serve now."""
        return frozenset(core.index for core in self._cores if core.is_ready)

    def core_ended(self, index: int, *, is_fault: bool) -> None:
        """Notify the front ends that the process of a core has ended."""
        for frontend in self._frontends:
            frontend.notify(messages.CoreGone(index, is_fault))
        if not self.ready_cores():
            self._no_core_serves.set()

    def core_ready(self, index: int) -> None:
        """Notify the front ends that a new process of a core serves."""
        self._no_core_serves.clear()
        for frontend in self._frontends:
            frontend.notify(messages.CoreReady(index))

    def frontend_ended(self, identity: str) -> None:
        """Notify the cores that the process of a front end has ended."""
        for core in self._cores:
            core.notify(messages.FrontendGone(identity))

    def end_frontend(self, identity: str) -> None:
        """Kill a front end that does not read the messages of a core."""
        for frontend in self._frontends:
            if frontend.identity == identity:
                _log.error("%s does not read: it is ended", frontend.name)
                frontend.kill()

    def count_restart(self, name: str) -> None:
        """Count the restart of a child."""
        self._restarts[name] += 1

    def _links_to_cores(self) -> Iterator[Link]:
        return (core.link for core in self._cores if core.link is not None and core.is_ready)

    def _read(self) -> Reading:
        return Reading(restarts=dict(self._restarts), caches={"stored_images": self.owner.images.load()})

    async def _start(self) -> None:
        """Start all processes, and return once they serve. Raises `StartFailed` and `PortUnavailable`."""
        if os.getpid() == 1:
            self._keeping.append(asyncio.create_task(self._reap_orphans()))
        self._keeping.append(asyncio.create_task(self.owner.images.watch()))
        self._keeping.append(asyncio.create_task(self.owner.front_ends.watch()))
        self._keeping.append(asyncio.create_task(self._watch_folder()))
        # Front ends import their libraries while cores load.
        self._keeping += [asyncio.create_task(self._keep(child)) for child in self._children]
        await asyncio.gather(*(child.first_ready for child in self._children), self._have_connected())
        config = self.config
        if config.metrics_port is not None:
            from kestrel_grpc.frontends.http.probes import ProbePort, Probes

            probes = Probes(lambda: True, self._is_ready, self.metrics)
            self._probe_port = ProbePort(probes, config.metrics_names)
            await self._probe_port.start(config.metrics_host, config.metrics_port)
            address = address_of(config.metrics_host, self._probe_port.port or 0)
            _log.info("metrics and probes of all processes on http://%s", address)
        freeze_existing_objects()
        self._frontends[0].notify(messages.Announce())

    async def _keep(self, child: _Child) -> None:
        """Keep a child running; if that fails, end the server rather than leave the child without a process."""
        try:
            await child.keep()
        except Exception:
            _log.exception("%s is not kept any more", child.name)
            child.fail_start("cannot be kept")
            self.end_because(f"{child.name} cannot be kept")

    async def _watch_folder(self) -> None:
        """End the server once its folder is removed; until then touch the folder regularly."""
        for number in itertools.count():
            self.require_folder()
            if number % _LOOKS_TO_TOUCH == 0:
                await asyncio.to_thread(touch, self.folder)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _have_connected(self) -> None:
        """Have the front ends connect to the cores, and listen, once all cores have loaded."""
        await asyncio.gather(*(core.first_ready for core in self._cores))
        for index in self.ready_cores():
            self.core_ready(index)

    async def _leave(self, delay_s: float) -> None:
        """Run the lame-duck period, which ends early if no core serves, and then drain the front ends."""
        _log.info("withdrawing: calls are taken for another %g s", delay_s)
        self._is_withdrawn = True
        self._notify_frontends(messages.Withdraw())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._no_core_serves.wait()
        self.is_ending = True
        self._notify_frontends(messages.Drain())
        await self._ended(self._frontends, self.config.drain_timeout + _LAST_S)

    async def _stop(self) -> None:
        """End every process that still runs: the front ends first, then the cores."""
        self.is_ending = self._is_withdrawn = True
        for children, timeout_s in ((self._frontends, _LAST_S), (self._cores, END_TIMEOUT_S)):
            for child in children:
                child.stop()
            await self._ended(children, timeout_s)
        for task in self._keeping:
            task.cancel()
        if self._probe_port is not None:
            await self._probe_port.close()
        for item in self._reservations:
            item.close()

    async def _ended(self, children: Iterable[_Child], timeout_s: float) -> None:
        """Wait until the processes of these children have ended; kill those that have not in time."""
        ends = {child.ended: child for child in children if child.ended is not None}
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=timeout_s)
        for end in late:
            _log.error("%s does not end: it is killed", ends[end].name)
            ends[end].kill()
        if late:
            await asyncio.wait(late)

    def _notify_frontends(self, note: Any) -> None:
        for frontend in self._frontends:
            frontend.notify(note)

    def _is_ready(self) -> bool:
        return not self._is_withdrawn and any(frontend.is_serving for frontend in self._frontends)

    def _reserve_ports(self) -> None:
        """Take the ports of the front ends, so that all of them get the same and no other server does."""
        config = self.config
        changes: dict[str, Any] = {}
        for name, host, port in (
            ("port", config.host, config.port),
            ("http_port", config.host, config.http_port),
            ("triton_port", config.host, config.triton_port),
            ("admin_port", config.admin_host, config.admin_port),
        ):
            if port is not None:
                reservation = reserved_port(host, port)
                self._reservations.append(reservation)
                changes[name] = reservation.getsockname()[1]
        self.config = replace(config, **changes)

    async def _reap_orphans(self) -> None:
        """Collect processes whose parents have ended, as the first process of a container must."""
        while True:
            await asyncio.sleep(_REAP_INTERVAL_S)
            collect_orphans({child.pid for child in self._children})


class _Child:
    """One front end or core: its process, and those that follow it."""

    module = "kestrel_grpc.multiprocess.supervision"
    title = ""
    min_pause_s = 0.0

    def __init__(self, supervisor: Supervisor, index: int) -> None:
        self.supervisor = supervisor
        self.index = index
        self.name = f"{self.title}-{index}"
        self.link: Link | None = None
        self.is_ready = False
        self.is_killed = False
        """True if the supervisor has killed the process."""
        self.first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int] | None = None
        """The exit status of the running process, once it has ended; negative for a signal."""
        self._process: subprocess.Popen[bytes] | None = None
        self._generation = 0

    @property
    def pid(self) -> int | None:
        """The id of the process that runs, or ran last."""
        return None if self._process is None else self._process.pid

    @property
    def identity(self) -> str:
        """The name of the running process, unlike those before it."""
        return f"{self.name}.{self._generation}"

    @property
    def label(self) -> tuple[str, str]:
        """The label of its metrics, and the label's value."""
        return "process", self.name

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of its process."""
        return {}

    def config(self) -> ServerConfig:
        """Returns the options of its process."""
        return self.supervisor.config

    def handle(self, link: Link) -> None:
        """Add the handlers of messages of the process."""

    def note_ready(self, *, is_first: bool) -> None:
        """Note that the process serves."""

    def note_end(self, status: int) -> None:
        """Note that the process has ended with this exit status, negative for a signal."""

    async def keep(self) -> None:
        """Run one process after the other, until the supervisor ends.

        If the first process ends before it is ready, the start of the server fails.
        """
        supervisor, loop = self.supervisor, asyncio.get_running_loop()
        pause_s = self.min_pause_s
        while not supervisor.is_ending:
            self._generation += 1
            started = loop.time()
            try:
                ended = self._spawn()
            except _CannotStart as error:
                said = f"cannot be started: {error}"
                if self.fail_start(said):
                    return
                supervisor.require_start(0)
                pause_s = max(1.0, pause_s)
            else:
                self.ended = ended
                status, was_ready = await self._run(ended)
                said = f"has ended with {_described(status)}"
                supervisor.require_start(status)
                if supervisor.is_ending:
                    if was_ready and status != 0:
                        _log.warning("%s %s", self.name, said)
                    return
                if self.fail_start(f"{said} before it was ready", status):
                    return
                if was_ready and loop.time() - started >= WELL_S:
                    pause_s = self.min_pause_s
            _log.error("%s %s; it is started again in %g s", self.name, said, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(max(1.0, 2 * pause_s), MAX_PAUSE_S)
            supervisor.count_restart(self.name)

    async def _run(self, ended: asyncio.Future[int]) -> tuple[int, bool]:
        """Serve the link to the process until it ends; returns its exit status, and True if it was ready."""
        self.link = link = Link(self.name)
        watching = asyncio.create_task(self._watch(link))
        watching.add_done_callback(self._end_unwatched)
        status = await asyncio.shield(ended)
        watching.cancel()
        was_ready, self.is_ready, self.link = self.is_ready, False, None
        self.note_end(status)
        return status, was_ready

    def fail_start(self, said: str, status: int = 1) -> bool:
        """Fail the start of the server, unless this child has been ready; returns True if it fails."""
        if self.first_ready.done():
            return False
        self.first_ready.set_exception(StartFailed(f"{self.name} {said}", status))
        return True

    def notify(self, note: Any) -> None:
        """Send a note to its process, if there is one."""
        if self.link is not None:
            self.link.notify(note)

    def stop(self) -> None:
        """End its process: by `Stop` if it serves, otherwise at once."""
        if self.is_ready:
            self.notify(messages.Stop())
        else:
            self.kill()

    def kill(self) -> None:
        """End its process at once."""
        self.is_killed = True
        if self._process is not None:
            self._process.kill()

    async def read_metrics(self) -> bytes:
        """Returns the metrics of its process, as Prometheus text; empty if it does not answer."""
        link = self.link
        try:
            return b"" if link is None else await link.ask(messages.ReadMetrics(), timeout_s=_METRICS_TIMEOUT_S)
        except SupervisorUnavailable as error:
            _log.warning("no metrics: %s", error)
            return b""

    def _spawn(self) -> asyncio.Future[int]:
        """Start a process; returns its end. Raises `_CannotStart`."""
        try:
            self._link_end, theirs = socket.socketpair()
            with theirs:
                process = self._started(theirs.fileno())
            try:
                ended = _end_of(process)
            except BaseException:
                process.kill()
                process.wait()
                raise
        except (OSError, subprocess.SubprocessError, RuntimeError, MemoryError) as error:
            raise _CannotStart(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
        self._process, self.is_killed = process, False
        with contextlib.suppress(OSError):  # it has ended already
            send_first(self._link_end, messages.Hello(self.supervisor.build, "supervisor"))
            send_first(self._link_end, self._begin())
        return ended

    def _started(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Returns a new process, which inherits the descriptor."""
        command = (sys.executable, "-m", self.module, self.title, str(descriptor))
        environment = {**os.environ, **self.environment}
        # Blocked signals stay blocked in the new process until it has handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor, self.supervisor.lock),
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _begin(self) -> messages.Begin:
        supervisor = self.supervisor
        return messages.Begin(
            config=self.config(),
            name=self.name,
            index=self.index,
            identity=self.identity,
            folder=str(supervisor.folder),
            num_cores=supervisor.num_cores,
            num_frontends=supervisor.num_frontends,
            ready_cores=supervisor.ready_cores(),
            instance_id=supervisor.instance_id,
        )

    async def _watch(self, link: Link) -> None:
        """Serve the link to the process, and kill the process if it does not answer."""
        ready = asyncio.Event()
        link.on(messages.Ready, lambda _: ready.set())
        self.handle(link)
        await link.start(self._link_end)
        await ready.wait()
        self.is_ready = True
        is_first = not self.first_ready.done()
        if is_first:
            self.first_ready.set_result(None)
        _log.info("%s is ready", self.identity)
        self.note_ready(is_first=is_first)
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            try:
                await link.ask(messages.Ping(), timeout_s=PING_TIMEOUT_S)
            except SupervisorUnavailable as error:
                if not self.supervisor.is_ending:
                    _log.error("%s: it is killed", error)
                    self.kill()
                return

    def _end_unwatched(self, watching: asyncio.Task[None]) -> None:
        """Kill the process if `_watch` has failed, since nothing would notice that it is ready, or hangs."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            _log.error("%s cannot be watched and is killed: %s", self.name, error)
            self.kill()


class _Core(_Child):
    title = "core"
    min_pause_s = 1.0

    def __init__(self, supervisor: Supervisor, index: int, place: CorePlace) -> None:
        super().__init__(supervisor, index)
        self._place = place

    @property
    def label(self) -> tuple[str, str]:
        return "engine", str(self.index)

    @property
    def environment(self) -> Mapping[str, str]:
        return self._place.environment

    def config(self) -> ServerConfig:
        return placed(super().config(), self._place)

    def handle(self, link: Link) -> None:
        link.on(messages.FrontendStuck, lambda note: self.supervisor.end_frontend(note.identity))

    def note_ready(self, *, is_first: bool) -> None:
        if not is_first:
            self.supervisor.core_ready(self.index)

    def note_end(self, status: int) -> None:
        # By the kernel when memory runs out, or by an operator; the supervisor itself kills processes that hang.
        was_killed_from_outside = status == -signal.SIGKILL and not self.is_killed
        self.supervisor.core_ended(self.index, is_fault=not was_killed_from_outside)


class _Frontend(_Child):
    title = "frontend"

    def __init__(self, supervisor: Supervisor, index: int) -> None:
        super().__init__(supervisor, index)
        self.is_serving = False
        """True while the front end accepts requests."""

    def handle(self, link: Link) -> None:
        self.supervisor.owner.join(self.identity, link)
        link.on(messages.Serving, self._note_serving)

    def note_end(self, status: int) -> None:
        self.is_serving = False
        self.supervisor.owner.drop(self.identity)
        self.supervisor.frontend_ended(self.identity)

    def _note_serving(self, note: messages.Serving) -> None:
        self.is_serving = note.is_serving


def _end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Returns the future exit status of a process, which a thread waits for."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        status = process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(status))

    threading.Thread(target=wait, name="kestrel-wait", daemon=True).start()
    return ended


def collect_orphans(own: Collection[int | None]) -> None:
    """Collect child processes that have ended, up to the first of our `own`, which threads wait for."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid in own:
                return
            os.waitpid(found.si_pid, os.WNOHANG)


def _described(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name
