"""Attacks by pictures, sent with one token while another asks about a small picture."""

import asyncio
import time
from functools import partial
from typing import Any

import grpc

from bench.attacks.attack import Attack, Outcome, Victim
from bench.attacks.bombs import jpeg_of_scans, png_of_one_colour, tiff_of_one_tile, webp_of_canvas
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_runtime.imaging.jpeg import MAX_SCANS

NUM_SCANS, NUM_JPEGS, JPEG_DEADLINE_S = 30_000, 4, 5.0
NUM_AT_ONCE = 8
NUM_LARGE, NUM_LARGEST = 256, 64


def _caption_all(
    num_calls: int, deadline_s: float | None, victim: Victim, seconds: float, picture: bytes
) -> Outcome:
    return asyncio.run(_captions(num_calls, deadline_s, victim, seconds, picture))


async def _captions(
    num_calls: int, deadline_s: float | None, victim: Victim, seconds: float, picture: bytes
) -> Outcome:
    """So many calls at once; then nothing, until the time is over, so that what they leave behind is seen."""
    outcome = Outcome()
    end = time.monotonic() + seconds
    request = wire.CompleteCaptionRequest(image={"data": picture}, sampling={"max_tokens": 4})
    metadata = (("authorization", f"Bearer {victim.token}"),)

    async def call(stub: Any) -> None:
        answer = stub.CompleteCaption(request, metadata=metadata, timeout=deadline_s or seconds)
        outcome[(await answer.code()).name] += 1

    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    async with grpc.aio.insecure_channel(victim.address, options=options) as channel:
        stub = VisionServiceStub(channel)
        await asyncio.gather(*(call(stub) for _ in range(num_calls)))
    if deadline_s is not None:
        await asyncio.sleep(max(0.0, end - time.monotonic()))
    return outcome


ATTACKS = (
    Attack(
        "jpeg-scans",
        f"{NUM_JPEGS} progressive JPEGs of {NUM_SCANS:,} scans, deadline {JPEG_DEADLINE_S:g} s; then SIGTERM",
        partial(_caption_all, NUM_JPEGS, JPEG_DEADLINE_S),
        partial(jpeg_of_scans, NUM_SCANS),
        sends_pictures=True,
        is_followed_by_sigterm=True,
    ),
    Attack(
        "jpeg-scans-allowed",
        f"{NUM_JPEGS} progressive JPEGs of {MAX_SCANS} scans, which is the limit, deadline {JPEG_DEADLINE_S:g} s",
        partial(_caption_all, NUM_JPEGS, JPEG_DEADLINE_S),
        partial(jpeg_of_scans, MAX_SCANS),
        sends_pictures=True,
        is_followed_by_sigterm=True,
    ),
    Attack(
        "tiff-tile",
        f"{NUM_AT_ONCE} TIFFs of 64 × 64 pixels in one tile of 26,000 × 26,000",
        partial(_caption_all, NUM_AT_ONCE, None),
        tiff_of_one_tile,
        sends_pictures=True,
    ),
    Attack(
        "png-alpha",
        f"{NUM_AT_ONCE} RGBA PNGs of 64 megapixels, 253 kB",
        partial(_caption_all, NUM_AT_ONCE, None),
        partial(png_of_one_colour, 8_000, 8_000, alpha=True),
        sends_pictures=True,
    ),
    Attack(
        "webp-canvas",
        f"{NUM_AT_ONCE} WebPs of 92 bytes with a canvas of 64 megapixels",
        partial(_caption_all, NUM_AT_ONCE, None),
        partial(webp_of_canvas, 8_000, 8_000),
        sends_pictures=True,
    ),
    Attack(
        "many-large-pictures",
        f"{NUM_LARGE} PNGs of 25 megapixels, one token",
        partial(_caption_all, NUM_LARGE, None),
        partial(png_of_one_colour, 5_000, 5_000, alpha=False),
        sends_pictures=True,
    ),
    Attack(
        "largest-pictures",
        f"{NUM_LARGEST} PNGs of 64 megapixels, which is the limit, one token",
        partial(_caption_all, NUM_LARGEST, None),
        partial(png_of_one_colour, 8_000, 8_000, alpha=False),
        sends_pictures=True,
    ),
)
