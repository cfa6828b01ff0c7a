"""Attacks by answers that are large or costly to make: embeddings that are never read, masks of large pictures."""

import asyncio
import io
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc
from PIL import Image, ImageDraw

from bench.attacks import http2
from bench.attacks.attack import Attack, Outcome, Victim
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

EMBED = "/kestrel.v1.VisionService/StreamEmbedImage"
NUM_CONNECTIONS, NUM_CALLS, READ_TIMEOUT_S = 8, 16, 3.0
NUM_MASKS, SIDE_PX = 8, 8_000


def picture(side_px: int) -> bytes:
    """A PNG with a circle, of a few kilobytes."""
    canvas = Image.new("P", (side_px, side_px))
    canvas.putpalette((255, 255, 255, 200, 30, 30))
    ImageDraw.Draw(canvas).ellipse([side_px // 4] * 2 + [side_px * 3 // 4] * 2, fill=1)
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()


def _read_nothing(victim: Victim, seconds: float, prepared: bytes) -> Outcome:
    return asyncio.run(_leave_embeddings_unread(victim, seconds, prepared))


async def _leave_embeddings_unread(victim: Victim, seconds: float, image: bytes) -> Outcome:
    """Ask for the embeddings of all patches again and again, and let the server send nothing of them."""
    request = wire.StreamEmbedImageRequest(image={"data": image}, type=wire.EMBEDDING_TYPE_FLOAT32)
    message = http2.grpc_message(request.SerializeToString())
    headers = http2.call_headers(EMBED, victim.token)
    return await http2.leave_unread(victim.host, victim.port, seconds, headers, message, NUM_CONNECTIONS, NUM_CALLS)


def _some_are_refused(outcome: Mapping[str, int], log: str) -> list[str]:
    return [] if outcome.get("RESOURCE_EXHAUSTED") else ["no call was refused"]


def _ask_for_masks(victim: Victim, seconds: float, prepared: bytes) -> Outcome:
    return asyncio.run(_large_masks(victim, seconds, prepared))


async def _large_masks(victim: Victim, seconds: float, image: bytes) -> Outcome:
    """Ask for masks of one large picture, several at a time, until the time is over."""
    outcome, end = Outcome(), time.monotonic() + seconds
    metadata = (("authorization", f"Bearer {victim.token}"),)

    async def ask(stub: Any, form: int) -> None:
        while time.monotonic() < end:
            # Its path is drawn anew each time, the picture is computed once.
            request = wire.SegmentRequest(object="circle", image={"data": image}, mask_format=form)  # pyrefly: ignore[bad-argument-type]
            answer = stub.Segment(request, metadata=metadata, timeout=seconds)
            outcome[(await answer.code()).name] += 1

    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    async with grpc.aio.insecure_channel(victim.address, options=options) as channel:
        stub = VisionServiceStub(channel)
        forms = (wire.MASK_FORMAT_PNG, wire.MASK_FORMAT_RUN_LENGTH)
        await asyncio.gather(*(ask(stub, forms[number % 2]) for number in range(NUM_MASKS)))
    return outcome


def _masks_are_made(outcome: Mapping[str, int], log: str) -> list[str]:
    return [] if outcome.get("OK") else ["no mask was made"]


ATTACKS = (
    Attack(
        "unread-embeddings",
        f"the patches of {NUM_CONNECTIONS * NUM_CALLS} pictures, asked for and never read, server with "
        f"`--stream-idle-timeout {READ_TIMEOUT_S:g}`",
        _read_nothing,
        partial(picture, 64),
        server_options=("--stream-idle-timeout", f"{READ_TIMEOUT_S:g}"),
        check=_some_are_refused,
    ),
    Attack(
        "large-masks",
        f"{NUM_MASKS} masks at a time of a picture of {SIDE_PX**2 / 1e6:.0f} megapixels",
        _ask_for_masks,
        partial(picture, SIDE_PX),
        check=_masks_are_made,
    ),
)
