"""Attacks by conversations: many huge pictures, a thousand turns, roles in any order, ids of another tenant."""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import grpc

from bench.attacks.attack import Attack, Outcome, Victim
from bench.attacks.bombs import png_of_one_colour
from bench.attacks.witnesses import small_picture
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_runtime.api.requests import MAX_CHAT_IMAGES, MAX_CHAT_MESSAGES

NUM_AT_ONCE = 8
NUM_TURNS = 1000
HUGE_PX = 8_000
"""The side of a picture of 64 megapixels, which is the limit; two take most of the memory for decoded images."""
NUM_WHOLE_BUDGET = 2
_CALL_TIMEOUT_S = 60.0
_SYSTEM, _USER, _ASSISTANT = wire.CHAT_ROLE_SYSTEM, wire.CHAT_ROLE_USER, wire.CHAT_ROLE_ASSISTANT
_REFUSED, _ANSWERED = "INVALID_ARGUMENT", "OK"

Chat = tuple[str, wire.CompleteChatRequest]
"""A kind of conversation, by which its outcomes are counted, and its request."""


def message(role: Any, text: str = "", *images: Mapping[str, Any]) -> wire.ChatMessage:
    """Returns a message with a text and images."""
    parts = [wire.ChatPart(image=image) for image in images]
    return wire.ChatMessage(role=role, parts=[*parts, wire.ChatPart(text=text)] if text else parts)


def conversation(*messages: wire.ChatMessage) -> wire.CompleteChatRequest:
    """Returns a request for a short answer."""
    return wire.CompleteChatRequest(messages=messages, sampling={"max_tokens": 2})


def huge_pictures(picture: bytes) -> Iterator[Chat]:
    """As many pictures as a conversation may have, in one message and over several."""
    image = {"data": picture}
    for number in itertools.count():
        asked = message(_USER, f"What differs? {number}", *[image] * MAX_CHAT_IMAGES)
        yield "in one message", conversation(asked)
        turns = [
            turn
            for _ in range(MAX_CHAT_IMAGES)
            for turn in (message(_USER, "What is it?", image), message(_ASSISTANT, "A picture."))
        ]
        yield "over the turns", conversation(*turns, message(_USER, f"Which one? {number}"))


def many_turns(prepared: None) -> Iterator[Chat]:
    """A thousand turns; as many as there may be, which do not fit the context; and as many that do."""

    def turns(count: int, words: str) -> list[wire.ChatMessage]:
        return [message(_ASSISTANT if place % 2 else _USER, words) for place in range(count)]

    for number in itertools.count():
        last = message(_USER, f"And {number}?")
        yield "too many", conversation(*turns(NUM_TURNS, "a"), last)
        yield "too long", conversation(*turns(MAX_CHAT_MESSAGES - 2, "then what is it? " * 5), last)
        yield "allowed", conversation(*turns(MAX_CHAT_MESSAGES - 2, "a"), last)


def alternating_roles(prepared: None) -> Iterator[Chat]:
    """Roles in every order, of which few are allowed."""
    image = {"data": small_picture()}
    for number in itertools.count():
        asked = message(_USER, f"What is it? {number}", image)
        system, told = message(_SYSTEM, "Be brief."), message(_ASSISTANT, "It is red.")
        yield "allowed", conversation(system, system, told, told, asked, asked, message(_USER, "And now?"))
        yield "refused", conversation(*[asked, system] * 64, asked)
        yield "refused", conversation(*[asked, told] * 64)
        yield "refused", conversation(message(_ASSISTANT, "It is red.", image), message(_SYSTEM, "a", image), asked)
        yield "refused", conversation(*[message(role % 6, "a", image) for role in range(12)])
        yield "refused", conversation(asked, message(_USER))
        yield "refused", conversation()


def ids_of_others(prepared: None) -> Iterator[Chat]:
    """Pictures that another token has stored, each named as that token would name it."""
    image = {"image_id": f"sha256:{hashlib.sha256(small_picture()).hexdigest()}"}
    for number in itertools.count():
        yield "named", conversation(message(_USER, f"What differs? {number}", *[image] * MAX_CHAT_IMAGES))


def whole_budget(picture: bytes) -> Iterator[Chat]:
    """Two pictures that no other conversation shows and that take most of the memory for decoded images."""
    for number in itertools.count():
        # What follows the end of the file is not decoded.
        images = [{"data": picture + f"{time.monotonic_ns()} {number} {place}".encode()} for place in range(2)]
        yield "whole budget", conversation(message(_USER, f"What differs? {number}", *images))


def _talk(
    chats: Callable[[Any], Iterator[Chat]], num_at_once: int, victim: Victim, seconds: float, prepared: Any
) -> Outcome:
    return asyncio.run(_talk_at_once(chats(prepared), num_at_once, victim, seconds))


async def _talk_at_once(chats: Iterator[Chat], num_at_once: int, victim: Victim, seconds: float) -> Outcome:
    """One conversation after the other, so many at once; counts the codes of each kind."""
    outcome, end = Outcome(), time.monotonic() + seconds
    metadata = (("authorization", f"Bearer {victim.token}"),)
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.max_send_message_length", -1),
    )

    async def talk(stub: Any) -> None:
        while time.monotonic() < end:
            kind, request = next(chats)
            call = stub.CompleteChat(request, metadata=metadata, timeout=_CALL_TIMEOUT_S)
            outcome[f"{kind}: {(await call.code()).name}"] += 1

    async with grpc.aio.insecure_channel(victim.address, options=options) as channel:
        await asyncio.gather(*(talk(VisionServiceStub(channel)) for _ in range(num_at_once)))
    return outcome


def _ended_as(wanted: Mapping[str, tuple[str, ...]], outcome: Mapping[str, int], log: str) -> list[str]:
    """Each kind of conversation had the first code of its list, and none that is not in it."""
    allowed = {f"{kind}: {code}" for kind, codes in wanted.items() for code in codes}
    found = [f"{count} ended with {name}" for name, count in outcome.items() if name not in allowed]
    missing = [kind for kind, codes in wanted.items() if not outcome.get(f"{kind}: {codes[0]}")]
    return found + [f"none ended with {kind}: {wanted[kind][0]}" for kind in missing]


def _row(
    name: str,
    what: str,
    chats: Callable[[Any], Iterator[Chat]],
    wanted: Mapping[str, tuple[str, ...]],
    num_at_once: int = NUM_AT_ONCE,
    **others: Any,
) -> Attack:
    return Attack(name, what, partial(_talk, chats, num_at_once), check=partial(_ended_as, wanted), **others)


_BUSY = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
"""The documented codes of a full queue and of a place that did not come in time."""
_PICTURE = partial(png_of_one_colour, HUGE_PX, HUGE_PX, alpha=False)
ATTACKS = (
    _row(
        "chat-huge-pictures",
        f"{NUM_AT_ONCE} conversations at a time with {MAX_CHAT_IMAGES} PNGs of 64 megapixels",
        huge_pictures,
        {"in one message": (_REFUSED, *_BUSY), "over the turns": (_REFUSED, *_BUSY)},
        prepare=_PICTURE,
        sends_pictures=True,
    ),
    _row(
        "chat-turns",
        f"{NUM_AT_ONCE} conversations at a time of {NUM_TURNS:,} turns, or as many as there may be",
        many_turns,
        {"too many": (_REFUSED,), "too long": (_REFUSED, *_BUSY), "allowed": (_ANSWERED, *_BUSY)},
    ),
    _row(
        "chat-roles",
        f"{NUM_AT_ONCE} conversations at a time with roles in any order",
        alternating_roles,
        {"allowed": (_ANSWERED, *_BUSY), "refused": (_REFUSED,)},
        sends_pictures=True,
    ),
    _row(
        "chat-ids",
        f"{NUM_AT_ONCE} conversations at a time about {MAX_CHAT_IMAGES} pictures that another token has stored",
        ids_of_others,
        {"named": ("NOT_FOUND",)},
        attacks_stored_images=True,
    ),
    _row(
        "chat-whole-budget",
        f"{NUM_WHOLE_BUDGET} conversations at a time, each with two PNGs of 64 megapixels",
        whole_budget,
        {"whole budget": (_ANSWERED, *_BUSY)},
        NUM_WHOLE_BUDGET,
        prepare=_PICTURE,
        sends_pictures=True,
    ),
)
