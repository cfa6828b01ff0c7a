"""Attacks on `UploadAdapter` by a caller with the scope `admin`: uploads that are slow, stalled or useless."""

from collections.abc import Callable, Mapping
from functools import partial

from bench.attacks import http2
from bench.attacks.attack import MIB, Attack
from bench.attacks.bodies import Send, all_but_the_end, send_all, slowly, whole
from kestrel_client.v1 import engine_service_pb2 as wire

UPLOAD = "/kestrel.v1.EngineService/UploadAdapter"
NUM_UPLOADS, UPLOAD_MIB = 200, 8


def upload_body() -> bytes:
    """The messages of an upload whose bytes are no adapter."""
    header = wire.AdapterHeader(name="attack", size_bytes=UPLOAD_MIB * MIB)
    parts = [wire.UploadAdapterRequest(header=header), *[wire.UploadAdapterRequest(chunk=bytes(MIB))] * UPLOAD_MIB]
    return b"".join(http2.grpc_message(part.SerializeToString()) for part in parts)


def _are_refused(name: str, outcome: Mapping[str, int], log: str) -> list[str]:
    """Uploads beyond the places end with RESOURCE_EXHAUSTED, those that have one with `name`."""
    allowed = ("RESOURCE_EXHAUSTED", name, "open")
    wrong = [f"{count} calls ended with {found}" for found, count in outcome.items() if found not in allowed]
    return wrong or ([] if outcome.get("RESOURCE_EXHAUSTED") else ["no upload was refused for want of a place"])


def _uploads(name: str, what: str, send: Send, ends_with: str) -> Attack:
    check: Callable[[Mapping[str, int], str], list[str]] = partial(_are_refused, ends_with)
    return Attack(
        name,
        f"{NUM_UPLOADS} adapters of {UPLOAD_MIB} MiB {what}, by an operator, two processes",
        partial(send_all, UPLOAD, send, NUM_UPLOADS // 2, True, ()),
        upload_body,
        num_processes=2,
        num_adapters=1,
        is_by_operator=True,
        check=check,
    )


ATTACKS = (
    _uploads("useless-adapters", "that are none", whole, "FAILED_PRECONDITION"),
    _uploads("slow-adapters", "sent slowly", slowly, "DEADLINE_EXCEEDED"),
    _uploads("stalled-adapters", "at once, the last byte withheld", all_but_the_end, "DEADLINE_EXCEEDED"),
)
