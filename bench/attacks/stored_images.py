"""Attacks on `ImageService`: uploads that are refused, slow or stalled, files that are never read, full quotas."""

import asyncio
import hashlib
import io
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from PIL import Image

from bench.attacks import http2
from bench.attacks.attack import MIB, Attack, Outcome, Victim
from bench.attacks.bodies import BODY_MIB, all_but_the_end, send_all, slowly, whole
from kestrel_client.v1 import image_service_pb2 as wire
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub

UPLOAD, GET = "/kestrel.v1.ImageService/UploadImage", "/kestrel.v1.ImageService/GetImage"
NUM_UPLOADS, NUM_LARGE_CHUNKS = 200, 40
UPLOAD_MIB, LARGE_CHUNK_MIB = 8, 8
NUM_SLOW_CONNECTIONS, NUM_SLOW_CALLS, READ_TIMEOUT_S = 8, 16, 3.0
_CALL_TIMEOUT_S = 30.0


def padded_jpeg(num_bytes: int, number: int = 0) -> bytes:
    """A JPEG of 64 × 64 pixels followed by bytes that decoders ignore; each number makes another file."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "JPEG")
    return file.getvalue().ljust(num_bytes - 8, b"\0") + struct.pack(">Q", number)


def upload_body(size_mib: int, chunk_mib: int) -> bytes:
    """The messages of one upload, one after the other."""
    data = padded_jpeg(size_mib * MIB)
    header = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    chunks = (data[start : start + chunk_mib * MIB] for start in range(0, len(data), chunk_mib * MIB))
    messages = [wire.UploadImageRequest(header=header), *(wire.UploadImageRequest(chunk=chunk) for chunk in chunks)]
    return b"".join(http2.grpc_message(message.SerializeToString()) for message in messages)


def _only(names: tuple[str, ...], outcome: Mapping[str, int], log: str) -> list[str]:
    """Calls ended in no other way than these; those that still run when the attack is over are `open`."""
    return [f"{count} calls ended with {name}" for name, count in outcome.items() if name not in names]


def _read_nothing(victim: Victim, seconds: float, prepared: None) -> Outcome:
    return asyncio.run(_leave_files_unread(victim, seconds))


async def _leave_files_unread(victim: Victim, seconds: float) -> Outcome:
    """Ask for a stored file again and again, and let the server send nothing of it."""
    data = padded_jpeg(UPLOAD_MIB * MIB)
    async with _images(victim) as (stub, metadata):
        await stub.PutImage(wire.PutImageRequest(data=data), metadata=metadata, timeout=_CALL_TIMEOUT_S)
    image_id = f"sha256:{hashlib.sha256(data).hexdigest()}"
    message = http2.grpc_message(wire.GetImageRequest(image_id=image_id, include_data=True).SerializeToString())
    headers = http2.call_headers(GET, victim.token)
    return await http2.leave_unread(
        victim.host, victim.port, seconds, headers, message, NUM_SLOW_CONNECTIONS, NUM_SLOW_CALLS
    )


def _connections_are_closed(outcome: Mapping[str, int], log: str) -> list[str]:
    return [] if outcome.get("closed") else ["no connection was closed"]


def _fill(victim: Victim, seconds: float, prepared: None) -> Outcome:
    return asyncio.run(_store_pinned(victim, seconds))


async def _store_pinned(victim: Victim, seconds: float) -> Outcome:
    """Store as many pinned images as the quota takes, and then as many others, which evict each other."""
    outcome, end = Outcome(), time.monotonic() + seconds

    async with _images(victim) as (stub, metadata):
        number = 0
        while time.monotonic() < end:
            number += 1
            request = wire.PutImageRequest(data=padded_jpeg(UPLOAD_MIB * MIB, number), pin=number % 2 == 0)
            try:
                await stub.PutImage(request, metadata=metadata, timeout=_CALL_TIMEOUT_S)
                outcome["stored, pinned" if request.pin else "stored"] += 1
            except grpc.aio.AioRpcError as error:
                outcome[error.code().name] += 1
    return outcome


def _is_bounded(outcome: Mapping[str, int], log: str) -> list[str]:
    return [] if outcome.get("RESOURCE_EXHAUSTED") else ["the quota was never reached"]


@asynccontextmanager
async def _images(victim: Victim) -> AsyncIterator[tuple[Any, tuple[tuple[str, str], ...]]]:
    """A stub, and the metadata with the token."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
    async with grpc.aio.insecure_channel(victim.address, options=options) as channel:
        yield ImageServiceStub(channel), (("authorization", f"Bearer {victim.token}"),)


def _uploads(
    name: str,
    what: str,
    send: Callable[..., Any],
    body: Callable[[], bytes],
    num_calls: int = NUM_UPLOADS,
    *,
    has_token: bool = True,
    **others: Any,
) -> Attack:
    strike = partial(send_all, UPLOAD, send, num_calls // 2, has_token, ())
    return Attack(
        name,
        f"{num_calls} {what}, two processes",
        strike,
        body,
        num_processes=2,
        attacks_stored_images=True,
        **others,
    )


ATTACKS = (
    _uploads(
        "uploads-no-token",
        f"uploads of {BODY_MIB} MiB without token",
        whole,
        partial(upload_body, BODY_MIB, 1),
        has_token=False,
        check=partial(_only, ("UNAUTHENTICATED", "open")),
    ),
    _uploads(
        "uploads-too-large",
        f"uploads of {BODY_MIB} MiB with a token, which the header announces",
        whole,
        partial(upload_body, BODY_MIB, 1),
        check=partial(_only, ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "open")),
    ),
    _uploads(
        "slow-uploads",
        f"uploads of {UPLOAD_MIB} MiB, sent slowly",
        slowly,
        partial(upload_body, UPLOAD_MIB, 1),
        check=partial(_only, ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "open")),
    ),
    _uploads(
        "stalled-uploads",
        f"uploads of {UPLOAD_MIB} MiB at once, the last byte withheld",
        all_but_the_end,
        partial(upload_body, UPLOAD_MIB, 1),
        check=partial(_only, ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "open")),
    ),
    _uploads(
        "large-chunks",
        f"uploads in chunks of {LARGE_CHUNK_MIB} MiB",
        whole,
        partial(upload_body, LARGE_CHUNK_MIB, LARGE_CHUNK_MIB),
        NUM_LARGE_CHUNKS,
        check=partial(_only, ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "open")),
    ),
    Attack(
        "unread-files",
        f"{NUM_SLOW_CONNECTIONS * NUM_SLOW_CALLS} files of {UPLOAD_MIB} MiB that are asked for and never read, "
        f"server with `--stream-idle-timeout {READ_TIMEOUT_S:g}`",
        _read_nothing,
        attacks_stored_images=True,
        server_options=("--stream-idle-timeout", f"{READ_TIMEOUT_S:g}"),
        check=_connections_are_closed,
    ),
    Attack(
        "full-quota",
        f"images of {UPLOAD_MIB} MiB, every second one pinned, without a pause and beyond the quota, one token",
        _fill,
        attacks_stored_images=True,
        check=_is_bounded,
    ),
)
