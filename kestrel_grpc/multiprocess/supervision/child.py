"""Sets up the processes of front ends and of engine cores, and links them to their supervisor."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from setproctitle import setproctitle

from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.protocol.link import Link, receive_first
from kestrel_grpc.process.resources import raise_descriptor_limit, return_free_memory, return_large_blocks
from kestrel_grpc.telemetry.logs import set_up_logging

OTHER_BUILD = 75
"""The exit status of a process that runs other code than its supervisor, since the packages have changed."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SWITCH_INTERVAL_S = 0.0005
"""The argument of `sys.setswitchinterval`: ten times that of a server of one process, since the turns of these
event loops are short. Each switch costs more than it saves."""
NEW_OBJECTS_OF_CORE = 3_000
"""New objects between two collections of garbage in a core. With Python's 700, those of the requests in flight,
which are no garbage, are examined again and again: for 4.6 µs a request about a known image, with 3,000 for 0.7."""
_LOOK_MS = 500

_log = logging.getLogger(__name__)


def begin(title: str) -> tuple[messages.Begin, socket.socket]:
    """Set up this process as the supervisor asks; returns its first message, and the socket to it.

    Exits if the supervisor is gone, or runs other code.
    """
    # A terminal and a service manager signal every process of the server. The supervisor alone decides; it has
    # blocked the signals until there are handlers. Handlers, unlike SIG_IGN, are not inherited by compilers.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    try:
        if receive_first(connection, messages.Hello).build != messages.build_id():
            sys.exit(OTHER_BUILD)  # the supervisor logs the reason
        said = receive_first(connection, messages.Begin)
    except EOFError:
        sys.exit(1)
    setproctitle(f"kestrel-grpc {title} {said.index}")
    set_up_logging(said.config.log_level, line_format=said.config.log_format, process=said.name)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_descriptor_limit()
    return said, connection


def memory_returner() -> Callable[[], object] | None:
    """Returns a function that gives free memory back to the system; None if the C library does not offer one."""
    return return_free_memory if return_large_blocks() else None


def new_link(read_metrics: Callable[[], object]) -> Link:
    """Returns a link to the supervisor that has not been started.

    `read_metrics` returns the text of this process's metrics, or a coroutine that returns it.
    """
    link = Link("the supervisor")
    link.on(messages.Ping, lambda _: None)
    link.on(messages.ReadMetrics, lambda _: read_metrics())
    return link


@contextlib.contextmanager
def ended_with_supervisor(connection: socket.socket) -> Iterator[None]:
    """Exit at once if the supervisor ends while this process loads, which may take minutes and serves no caller."""
    is_loaded = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLHUP | select.POLLRDHUP)
        while not is_loaded.is_set():
            if poll.poll(_LOOK_MS) and not is_loaded.is_set():  # else requests are finished first
                _log.error("the supervisor is gone")
                logging.shutdown()
                os._exit(1)

    threading.Thread(target=watch, name="kestrel-supervisor", daemon=True).start()
    try:
        yield
    finally:
        is_loaded.set()
