"""HTTP/2 and gRPC spoken badly to an open port. `Target.hear` is what must hold for each conversation."""

import gzip
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Self

from hypothesis import strategies as st

from bench.attacks import http2
from kestrel_client import Client
from tests.fuzzing.images import damaged
from tests.fuzzing.requests import methods, paths, requests
from tests.journey.serving_process import ServingProcess, serving_process

_PATIENCE_S = 30.0
_QUERY = "/kestrel.v1.VisionService/Query"
_FRAME_BYTES = 16_384
_MIB = 2**20
_PRIORITY, _PUSH_PROMISE = 0x2, 0x5
_HEADER_NAMES = (
    *("grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "authorization", "x-request-id", "some-bin"),
    *("traceparent", "tracestate", "content-type", "te", ":path", "connection", "cookie"),
)


class Target:
    """A server of its own, and whether it still stands."""

    def __init__(self, server: ServingProcess) -> None:
        self.server = server
        host, port = server.address.rsplit(":", 1)
        self._at = (host, int(port))

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        """A server that must still end as told when all is over."""
        with serving_process() as server:
            yield cls(server)

    def hear(self, said: bytes) -> str:
        """Say it all on a connection of its own; the server must let go of the connection once we have."""
        with socket.create_connection(self._at, timeout=_PATIENCE_S) as connection:
            try:
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                num_bytes = sum(len(data) for data in iter(lambda: connection.recv(65_536), b""))
            except TimeoutError:
                raise
            except OSError:
                return "cut off"
        return "answered" if num_bytes > 100 else "greeted" if num_bytes else "ignored"

    def assert_well(self) -> None:
        """The server answers a call as if nothing had been."""
        with Client(self.server.address) as client:
            assert client.complete_query(None, "hi", max_tokens=2).usage.output_token_count > 0


def _framed(data: bytes, compressed: int, length_off_by: int) -> bytes:
    return struct.pack(">BI", compressed, max(0, len(data) + length_off_by) & 0xFFFFFFFF) + data


_ids = st.one_of(st.sampled_from((0, 1, 3, 5, 7, 2)), st.integers(0, 2**31 - 1))
_paths = st.one_of(st.sampled_from(paths()), st.text(max_size=30))
_flags = st.sets(st.sampled_from((http2.END_STREAM, http2.END_HEADERS, http2.PADDED, http2.PRIORITY))).map(sum)
_header_values = st.one_of(
    st.sampled_from(("1S", "0n", "99999999H", "-1S", "1", "gzip", "identity", "deflate", "x" * 9_000)),
    st.text(st.characters(max_codepoint=255), max_size=30),
)
_headers = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(_HEADER_NAMES), st.text(st.characters(max_codepoint=127), max_size=12)),
        _header_values,
    ),
    max_size=6,
)
_messages = st.builds(
    _framed,
    st.sampled_from(methods()).flatmap(requests),
    st.sampled_from((0, 0, 0, 1, 2, 255)),
    st.sampled_from((0, 0, 0, -1, 1, -10_000, 1_000, 2**26, 2**31)),
)


_payloads = st.binary(max_size=64)
_numbers = st.integers(0, 2**32 - 1)
_BODIES = (
    (http2.DATA, _payloads),
    (http2.HEADERS, _payloads),
    (_PRIORITY, st.builds(struct.Struct(">IB").pack, _numbers, st.integers(0, 255))),
    (http2.RST_STREAM, _numbers.map(struct.Struct(">I").pack)),
    (
        http2.SETTINGS,
        st.dictionaries(st.integers(0, 10), _numbers, max_size=5).map(
            lambda values: b"".join(struct.pack(">HI", *item) for item in values.items())
        ),
    ),
    (_PUSH_PROMISE, _payloads.map(lambda payload: struct.pack(">I", 2) + payload)),
    (http2.PING, st.binary(min_size=8, max_size=8)),
    (http2.GOAWAY, st.builds(struct.Struct(">II").pack, _ids, _numbers)),
    (http2.WINDOW_UPDATE, st.integers(1, 2**31 - 1).map(struct.Struct(">I").pack)),
    (http2.CONTINUATION, _payloads),
)
"""By the kind of a frame, what may be in it."""


@st.composite
def _calls(draw: st.DrawFn) -> bytes:
    """A call as it should be, but for what is in it."""
    stream = draw(st.sampled_from((1, 1, 3, 5)))
    headers = http2.call_headers(draw(_paths), extra=draw(_headers))
    flags = http2.END_STREAM if draw(st.booleans()) else 0
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, headers) + http2.frame(
        http2.DATA, flags, stream, draw(_messages)
    )


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """One frame of any kind with a body that fits its kind, with any flags, on any stream."""
    kind, body = draw(st.sampled_from(_BODIES).flatmap(lambda item: st.tuples(st.just(item[0]), item[1])))
    return http2.frame(kind, draw(_flags), draw(_ids), body) * draw(st.sampled_from((1, 1, 1, 2, 50)))


@st.composite
def _made_up_frames(draw: st.DrawFn) -> bytes:
    """A frame's header with anything in it, and a body that need not be as long as it says."""
    body = draw(st.binary(max_size=64))
    length = draw(st.one_of(st.just(len(body)), st.integers(0, 2**24 - 1)))
    kind, flags = draw(st.one_of(st.integers(0, 10), st.integers(0, 255))), draw(st.integers(0, 255))
    return struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, draw(st.integers(0, 2**32 - 1))) + body


def _bomb(num_references: int, num_continuations: int) -> bytes:
    """A header of 4 KB that is said once and then referred to, a byte for each time."""
    block = http2.call_headers(_QUERY, extra=[("bomb", "x" * 4_000)]) + b"\xbe" * num_references
    frames = [http2.frame(http2.HEADERS, 0, 1, block[:16_000])]
    frames += [http2.frame(http2.CONTINUATION, 0, 1, b"\xbe" * 1_000)] * num_continuations
    return b"".join((*frames, http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1)))


def _call(stream: int, headers: bytes, message: bytes | None, flags: int = http2.END_STREAM) -> bytes:
    """The frames of a call; without a message it has none, and its end is open."""
    frames = [http2.frame(http2.HEADERS, http2.END_HEADERS, stream, headers)]
    for start in range(0, 0 if message is None else len(message), _FRAME_BYTES):
        assert message is not None
        is_last = start + _FRAME_BYTES >= len(message)
        piece = message[start : start + _FRAME_BYTES]
        frames.append(http2.frame(http2.DATA, flags if is_last else 0, stream, piece))
    return b"".join(frames)


@st.composite
def _resets(draw: st.DrawFn) -> bytes:
    """Calls that are taken back, each at once, or all when all have begun, for any reason; some twice."""
    headers = http2.call_headers(draw(_paths))
    message = draw(st.sampled_from((None, b"", http2.grpc_message(b""), http2.grpc_message(b"\n\x02hi"))))
    reason = struct.pack(">I", draw(st.one_of(st.sampled_from((0, 8)), st.integers(0, 2**32 - 1))))
    streams = range(1, 2 * draw(st.sampled_from((1, 10, 90, 110, 500))), 2)
    calls = [_call(stream, headers, message) for stream in streams]
    resets = [http2.frame(http2.RST_STREAM, 0, stream, reason) * draw(_once_or_twice) for stream in streams]
    if draw(st.booleans()):
        return b"".join(call + reset for call, reset in zip(calls, resets, strict=True))
    return b"".join((*calls, *resets))


@st.composite
def _pings(draw: st.DrawFn) -> bytes:
    """Pings, greetings or windows, hundreds of them, and perhaps a call in between."""
    one = draw(
        st.sampled_from(
            (
                http2.frame(http2.PING, 0, 0, bytes(8)),
                http2.frame(http2.PING, http2.ACK, 0, bytes(8)),
                http2.settings(),
                http2.settings(initial_window_size=0) + http2.settings(initial_window_size=2**31 - 1),
                http2.frame(http2.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
            )
        )
    )
    call = _call(1, http2.call_headers(_QUERY), http2.grpc_message(b"\n\x02hi"))
    count = draw(st.sampled_from((1, 50, 99, 101, 1_000)))
    return one * count + draw(st.sampled_from((b"", call))) + one * count


@st.composite
def _inflating(draw: st.DrawFn) -> bytes:
    """A message that is compressed, or says so, and is a thousand times as large once it is not."""
    size = draw(st.sampled_from((0, 1_000, _MIB, 32 * _MIB, 80 * _MIB)))
    encoding = draw(st.sampled_from(("gzip", "deflate", "identity", "snappy")))
    data = _compressed(size) if draw(st.booleans()) else bytes(min(size, 100_000))
    message = http2.grpc_message(data, compressed=draw(st.booleans()))
    message = message[: len(message) - draw(st.sampled_from((0, 0, 1, 100)))]
    return _call(1, http2.call_headers(_QUERY, extra=[("grpc-encoding", encoding)]), message)


@lru_cache
def _compressed(num_bytes: int) -> bytes:
    return gzip.compress(bytes(num_bytes), mtime=0)


@st.composite
def _open_ended(draw: st.DrawFn) -> bytes:
    """Calls on many streams, of which none gets its end."""
    message = http2.grpc_message(bytes(draw(st.sampled_from((0, 1, 20_000)))))
    message = message[: draw(st.sampled_from((1, 4, 5, len(message) - 1, len(message))))]
    headers = http2.call_headers(draw(_paths))
    count = draw(st.sampled_from((1, 99, 101, 300)))
    return b"".join(_call(stream, headers, message, flags=0) for stream in range(1, 2 * count, 2))


_once_or_twice = st.sampled_from((1, 1, 1, 2))
_said = st.one_of(
    _calls(),
    _calls(),
    _frames(),
    _made_up_frames(),
    st.builds(_bomb, st.integers(0, 10_000), st.integers(0, 50)),
    _resets(),
    _pings(),
    _inflating(),
    _open_ended(),
)
_prefaces = st.one_of(
    st.just(http2.PREFACE + http2.settings()),
    st.just(http2.PREFACE + http2.settings()),
    damaged(st.just(http2.PREFACE + http2.settings())),
    st.just(b""),
)
conversations = st.builds(lambda preface, said: preface + b"".join(said), _prefaces, st.lists(_said, max_size=8))
"""All that is said on one connection."""
