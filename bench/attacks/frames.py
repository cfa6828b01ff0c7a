"""Attacks by streams of frames: floods of frames, large and broken ones, answers that are never read, silence."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from bench.attacks.attack import MIB, Attack, Outcome, Question, Victim
from kestrel_client.v1 import media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

NUM_STREAMS = 32
_SIDE_PX = 8
_MAX_ANSWER_S = 4.0
_PER_CHANNEL = 16


@dataclass(frozen=True, slots=True)
class _Flood:
    """Describes what an attacker sends on each of its streams, as fast as the server reads."""

    num_pixels: int = _SIDE_PX * _SIDE_PX
    is_broken: bool = False
    """True if the frames are no images."""
    is_idle: bool = False
    """True if no frame follows the settings."""
    reads: bool = True

    def messages(self) -> Iterator[wire.DetectFramesRequest]:
        request = wire.DetectRequest(object="car")
        yield wire.DetectFramesRequest(settings=wire.DetectFramesSettings(request=request, track=True))
        width_px = _SIDE_PX if self.num_pixels == _SIDE_PX * _SIDE_PX else 1024
        height_px = self.num_pixels // width_px
        raw = media_pb2.RawImage(
            pixels=bytes(3 * width_px * height_px),
            width_px=width_px,
            height_px=height_px,
            format=media_pb2.PIXEL_FORMAT_RGB8,
        )
        image = media_pb2.Image(data=b"no image") if self.is_broken else media_pb2.Image(raw=raw)
        frame = wire.DetectFramesRequest(frame=wire.Frame(image=image))
        while not self.is_idle:
            yield frame


def _strike(flood: _Flood, victim: Victim, seconds: float, prepared: None) -> Outcome:
    return asyncio.run(_stream(flood, victim, seconds))


async def _stream(flood: _Flood, victim: Victim, seconds: float) -> Outcome:
    outcome = Outcome()
    metadata = (("authorization", f"Bearer {victim.token}"),)

    async def stream(channel: grpc.aio.Channel) -> None:
        stub: Any = VisionServiceStub(channel)
        call = stub.DetectFrames(metadata=metadata)
        try:
            async with asyncio.timeout(seconds):
                reading = asyncio.create_task(_read(call)) if flood.reads else None
                for message in flood.messages():
                    await call.write(message)
                if reading is not None:
                    await reading
                else:
                    await asyncio.sleep(seconds)
        except TimeoutError:
            outcome["open"] += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            outcome[(await call.code()).name] += 1
        finally:
            call.cancel()

    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [
        grpc.aio.insecure_channel(victim.address, options) for _ in range(1 + (NUM_STREAMS - 1) // _PER_CHANNEL)
    ]
    try:
        await asyncio.gather(*(stream(channels[index // _PER_CHANNEL]) for index in range(NUM_STREAMS)))
    finally:
        for channel in channels:
            await channel.close()
    return outcome


async def _read(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):  # the writer counts how the call has ended
        while await call.read():
            pass


def _row(name: str, what: str, flood: _Flood) -> Attack:
    return Attack(
        name,
        f"{NUM_STREAMS} streams of frames with a token: {what}",
        partial(_strike, flood),
        question=Question(max_s=_MAX_ANSWER_S),
    )


ATTACKS = (
    _row("frame-flood", "small frames without a pause", _Flood()),
    _row("large-frames", "frames of 12 MiB without a pause", _Flood(num_pixels=4 * MIB)),
    _row("broken-frames", "frames that are no images, without a pause", _Flood(is_broken=True)),
    _row("unread-frames", "small frames without a pause, whose answers are never read", _Flood(reads=False)),
    _row("idle-frames", "no frame after the settings", _Flood(is_idle=True)),
)
