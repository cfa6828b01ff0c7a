"""Defines the messages between the supervisor and its children about the life of the processes."""

from __future__ import annotations

import msgspec

from kestrel_grpc.config.options import ServerConfig


class Begin(msgspec.Struct, frozen=True):
    """Sets up a new process: the first message to it."""

    config: ServerConfig
    """The options, with the ports that the supervisor has reserved."""
    name: str
    """A name such as "frontend-0"."""
    index: int
    identity: str
    """A name such as "frontend-0.3", for the third process of that name."""
    folder: str
    """The private folder of the server."""
    num_cores: int
    num_frontends: int
    ready_cores: frozenset[int]
    """The cores that serve now; a front end connects to them."""
    instance_id: str
    build: str
    """The digest of the code that the supervisor runs."""


class Ready(msgspec.Struct):
    """Notes that a child serves."""


class Serving(msgspec.Struct):
    """Notes that a front end has begun or ceased to accept requests."""

    is_serving: bool


class Announce(msgspec.Struct):
    """Asks one front end to print the addresses, since all processes serve."""


class Ping(msgspec.Struct):
    """Asks a child for an empty answer."""


class ReadMetrics(msgspec.Struct):
    """Asks a child for its own metrics, or the supervisor for those of all processes."""


class CoreGone(msgspec.Struct):
    """Notes to front ends that the process of a core has ended."""

    index: int
    is_fault: bool
    """True if a request may be the cause; False if the process was killed from outside the server."""


class CoreReady(msgspec.Struct):
    """Notes to front ends that a new process of a core listens."""

    index: int


class FrontendGone(msgspec.Struct):
    """Notes to cores that the process of a front end has ended."""

    identity: str


class FrontendStuck(msgspec.Struct):
    """Notes that a front end does not read the messages of a core."""

    identity: str


class ReadAgain(msgspec.Struct):
    """Asks front ends to read tokens and certificates again."""


class Withdraw(msgspec.Struct):
    """Asks front ends to begin the lame-duck period."""


class Drain(msgspec.Struct):
    """Asks front ends to finish the running calls, and to exit."""


class Stop(msgspec.Struct):
    """Asks a child to exit now."""
