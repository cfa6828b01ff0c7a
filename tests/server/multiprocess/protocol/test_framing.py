"""Frames are found in a stream of bytes, however it is cut."""

import random
import socket

import pytest

from kestrel_grpc.multiprocess.protocol.framing import FrameTooLong, ReceivedFrames, framed, receive_frame

SENT = [(b"", False), (b"a", True), (bytes(262_143), False), (bytes(300_001), True), (b"last", False)]
STREAM = b"".join(framed(data, has_file=has_file) for data, has_file in SENT)


def receive(received: ReceivedFrames, data: bytes) -> list[tuple[bytes, bool]]:
    """The frames that are complete after `data`."""
    found: list[tuple[bytes, bool]] = []
    while data:
        room = received.room()
        part, data = data[: len(room)], data[len(room) :]
        room[: len(part)] = part
        received.add(len(part))
        while (frame := received.next()) is not None:
            found.append(frame)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_found_wherever_the_stream_is_cut(seed: int) -> None:
    random_ = random.Random(seed)
    received = ReceivedFrames()
    found: list[tuple[bytes, bool]] = []
    rest = STREAM * 2
    while rest:
        length = random_.choice((1, 4, 5, 6, 97, 65_537, 262_149))
        found += receive(received, rest[:length])
        rest = rest[length:]
    assert found == SENT * 2
    assert received.num_bytes == 0


def test_a_frame_above_the_limit_is_refused_before_there_is_memory_for_it() -> None:
    received = ReceivedFrames(max_bytes=1000)
    assert receive(received, framed(bytes(1000))) == [(bytes(1000), False)]
    with pytest.raises(FrameTooLong):
        receive(received, framed(bytes(1001))[:5])
    assert len(received.room()) < 2**20


def test_a_frame_is_received_without_an_event_loop() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(b"one") + framed(b"")[:3])
        assert receive_frame(theirs) == b"one"
        ours.close()
        with pytest.raises(EOFError):
            receive_frame(theirs)
