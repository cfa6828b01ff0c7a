"""Defines all messages between the processes of a server.

A new operation is a message here (`questions.py` describes those that are answered), a handler in the process that
does it, and a caller. Every connection begins with `Hello`, which carries the version and never changes. The
version is the build: all other messages are exchanged between processes of one build. Types of `api` are sent as
they are.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from kestrel_grpc.access.limits import TokenLimit
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.stored_images import ImageHandle, Retention, StoredImage
from kestrel_grpc.multiprocess.protocol.errors import WireError
from kestrel_grpc.multiprocess.protocol.questions import Codec, Message, Question
from kestrel_runtime.api.adapters import AdapterInfo
from kestrel_runtime.api.engine import ClearedCache, EngineInfo, EngineStatus, ImageInfo, Load
from kestrel_runtime.api.events import Event

_PACKAGES = ("kestrel_client", "kestrel_grpc", "kestrel_ops", "kestrel_runtime")


class Hello(Message):
    """Introduces a process: the first message of every connection, in a frame of its own.

    The messages that follow can be read if both processes have the same build.
    """

    build: str
    """The digest of the code that the process runs."""
    identity: str
    """A name such as "frontend-0.3", for the third process of that name."""


# Between the supervisor and all of its children


class Begin(Message):
    """Sets up a new process: the first message to it after `Hello`."""

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


class Ready(Message):
    """Notes that a child serves."""


class Ping(Question[None]):
    """Asks a child if it answers."""


class ReadMetrics(Question[bytes]):
    """Asks a child for its own metrics, or the supervisor for those of all processes."""


class Stop(Message):
    """Asks a child to exit now."""


# Between the supervisor and front ends: the life of the processes


class Serving(Message):
    """Notes that a front end has begun or ceased to accept requests."""

    is_serving: bool


class Announce(Message):
    """Asks one front end to print the addresses, since all processes serve."""


class CoreGone(Message):
    """Notes that the process of a core has ended."""

    index: int
    is_fault: bool
    """True if a request may be the cause; False if the process was killed from outside the server."""


class CoreReady(Message):
    """Notes that a new process of a core listens."""

    index: int


class ReadAgain(Message):
    """Asks front ends to read tokens and certificates again."""


class Withdraw(Message):
    """Asks front ends to begin the lame-duck period."""


class Drain(Message):
    """Asks front ends to finish the running calls, and to exit."""


# Between the supervisor and engine cores


class FrontendGone(Message):
    """Notes that the process of a front end has ended."""

    identity: str


class FrontendStuck(Message):
    """Notes that a front end does not read the messages of a core."""

    identity: str


class ImageExpired(Message):
    """Notes that an image has expired; `sha256` is in hexadecimal digits."""

    namespace: str
    sha256: str


# From front ends to the supervisor: limits of tokens


class EnterCall(Question[None]):
    """Asks to count a call as `count` requests. The front end numbers its calls.

    The answer is an error if the call exceeds a limit.
    """

    number: int
    limit: TokenLimit
    count: int = 1
    takes_place: bool = True
    """False if another call holds its place among the concurrent ones."""


class AdoptCall(Message):
    """Reports a call to be counted that runs already."""

    number: int
    limit: TokenLimit


class LeaveCall(Message):
    """Reports that a call has ended, or that no caller waits for the answer to its `EnterCall` any more."""

    number: int


# Between front ends and the supervisor: stored images


class RequireRoom(Question[None]):
    """Asks if a file of this size would be stored. The answer is an error if it would not."""

    namespace: str
    num_bytes: int


class RenewImage(Question[StoredImage | None]):
    """Asks to keep an image for longer; the answer is None if it is not stored."""

    namespace: str
    handle: ImageHandle
    retention: Retention


class PutImage(Question[StoredImage]):
    """Asks to store the file that the front end has written under this name."""

    namespace: str
    handle: ImageHandle
    size_bytes: int
    info: ImageInfo
    retention: Retention
    name: str


class FindImage(Question[StoredImage]):
    """Asks for an image, which counts as used now."""

    namespace: str
    handle: ImageHandle


class DeleteImage(Question[None]):
    """Asks to drop an image."""

    namespace: str
    handle: ImageHandle


class DropNamespace(Message):
    """Notes that a namespace has lost its last caller."""

    namespace: str


class DropFile(Message):
    """Notes to front ends that an image has left the store."""

    namespace: str
    handle: ImageHandle


# Between front ends, through the supervisor


class TakePart(Message):
    """Notes that a front end answers the questions of others from now on."""


class AskAll(Question[list[bytes]]):
    """Asks all other front ends. The answer is the list of their answers."""

    topic: str
    question: bytes
    needs_all: bool
    """True if a front end that does not answer is an error; otherwise its answer is left out."""


class AskOne(Question[bytes]):
    """Asks one front end, for another."""

    topic: str
    question: bytes


# From a front end to a core


class Submit(Message):
    """Submits a request, with an id for each sample. `deadline` is a moment of the system's monotonic clock."""

    ids: tuple[int, ...]
    fingerprints: tuple[str, ...]
    """The fingerprint of each sample."""
    request: bytes
    deadline: float | None
    tenant: str
    namespace: str


class OnlyEnd(Message):
    """Notes that callers wait for the end of these requests alone: earlier events need not be sent."""

    ids: tuple[int, ...]


class Cancel(Message):
    """Cancels these requests."""

    ids: tuple[int, ...]


class Pixels(Message):
    """Answers `NeedPixels`, with a file of the pixels as in `DecodedPixels`, or with an error."""

    number: int
    width_px: int
    height_px: int
    error: WireError | None = None


class Isolate(Message):
    """Asks to run each of these requests alone: they were in flight when the process of a core ended."""

    fingerprints: tuple[str, ...]


class Quarantine(Message):
    """Asks to refuse these requests, which have ended processes of cores."""

    fingerprints: tuple[str, ...]


class Expect(Question[None]):
    """Asks for a place in the queue for a request whose image is still being fetched."""

    place: int
    request: bytes
    deadline: float | None
    tenant: str


class Release(Message):
    """Gives back a place in the queue, or stops waiting for it."""

    place: int


class ClearCache(Question[ClearedCache]):
    """Asks to remove what is cached for a namespace, or for all."""

    namespace: str | None


class ForgetImage(Question[ClearedCache]):
    """Asks to remove what is cached for one image of a namespace."""

    digest: bytes
    namespace: str


class AdapterNames(Question[list[str]]):
    """Asks for the names of adapters."""


class LoadAdapter(Question[AdapterInfo]):
    """Asks to read an adapter again."""

    name: str


class UnloadAdapter(Question[AdapterInfo]):
    """Asks to free the slot of an adapter."""

    name: str


class CheckAdapter(Question[str]):
    """Asks to check the files of a folder that is to be an adapter. The answer is their digest."""

    folder: str
    name: str


class AdapterChanged(Question[None]):
    """Asks to use the files that an adapter has now."""

    name: str


# From a core to its front ends


class Welcome(Message):
    """Answers the `Hello` of a front end of the same build."""

    info: EngineInfo
    process_id: int


class CoreState(Message):
    """Reports the state of a core, when it changes and several times a second."""

    status: EngineStatus
    load: Load
    adapters: tuple[AdapterInfo, ...]


class EventsOf(msgspec.Struct, array_like=True):
    """The next events of one request; an error is the last."""

    id: int
    events: list[Event]
    error: WireError | None = None


class Events(Message):
    """Delivers the events of one turn of the engine."""

    of_requests: list[EventsOf]


class CompletedAlone(Message):
    """Reports that an isolated request completed."""

    fingerprint: str


class NeedPixels(Message):
    """Asks for an image of the request that one of whose ids is `id`; a thread of the core waits for `Pixels`."""

    number: int
    id: int
    image: int = 0
    """The number of the image in the request."""


CODEC = Codec(
    *(
        kind
        for kind in tuple(vars().values())
        if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == __name__
    )
)
"""Encodes and decodes all messages of this module."""


@cache
def build_id() -> str:
    """Returns a digest of the code of the server's packages, as it was on the disk at the first call."""
    digest = hashlib.sha256()
    for name in _PACKAGES:
        spec = find_spec(name)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{name}/{path.relative_to(folder)}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
