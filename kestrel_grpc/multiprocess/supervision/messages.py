"""Defines what the supervisor and its children say to each other about the life of the processes."""

from __future__ import annotations

import msgspec

from kestrel_grpc.config.options import ServerConfig


class Begin(msgspec.Struct, frozen=True):
    """To a new process: the first message."""

    config: ServerConfig
    """The configuration with the ports that the supervisor has reserved."""
    name: str
    """Such as "frontend-0"."""
    index: int
    identity: str
    """Such as "frontend-0.3" for the third process of that name."""
    folder: str
    """The private folder of the server."""
    num_cores: int
    num_frontends: int
    ready_cores: frozenset[int]
    """To a front end: the cores that serve now."""
    instance_id: str
    build: str
    """The digest of the code that the supervisor runs."""


class Ready(msgspec.Struct):
    """A child reports that it serves."""


class Serving(msgspec.Struct):
    """A front end reports whether it accepts requests."""

    is_serving: bool


class Announce(msgspec.Struct):
    """To one front end: print the addresses, since all processes serve."""


class Ping(msgspec.Struct):
    """To a child: answer with nothing."""


class ReadMetrics(msgspec.Struct):
    """To a child: answer with its own metrics. From a front end: with those of all processes."""


class CoreGone(msgspec.Struct):
    """To front ends: the process of a core has ended."""

    index: int
    is_fault: bool
    """True if it may have ended because of a request. False if something outside of the server has killed it."""


class CoreReady(msgspec.Struct):
    """To front ends: a new process of a core listens."""

    index: int


class FrontendGone(msgspec.Struct):
    """To cores: the process of a front end has ended."""

    identity: str


class FrontendStuck(msgspec.Struct):
    """A core reports that a front end does not read what it is sent."""

    identity: str


class ReadAgain(msgspec.Struct):
    """To front ends: read tokens and certificates again."""


class Withdraw(msgspec.Struct):
    """To front ends: begin the lame-duck period."""


class Drain(msgspec.Struct):
    """To front ends: finish the calls that run, and exit."""


class Stop(msgspec.Struct):
    """To a child: exit now."""
