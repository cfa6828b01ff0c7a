"""Traffic as it comes: every skill, streams and unary calls, pictures of many sizes, and callers who misbehave.

Some cancel midway, some have deadlines that pass, some send what is no request. Each of these says beforehand what
may become of its call; any other outcome is an unexpected error. Knows the client alone.
"""

import asyncio
import io
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from bench.harness.workload import QUESTIONS, TEXT_QUESTIONS, chart
from kestrel_client import AsyncClient
from kestrel_client.errors import Cancelled, DeadlineExceeded, KestrelClientError

WAIT_LIMIT_S = 120.0
PAUSE_S = 0.05
"""Between two calls of a caller, on average."""
_SIZES_PX = ((64, 48), (200, 140), (378, 378), (800, 557), (1280, 900), (2400, 1600))
_OBJECTS = ("star", "yellow star", "bar", "blue circle", "label")
_MAX_ERRORS = 50
_CALLS_PER_CONNECTION = 25

Ask = Callable[[AsyncClient, random.Random], Awaitable[Any]]


@dataclass(slots=True)
class Tally:
    """What became of the calls, by kind. `errors` are unexpected ones, the first of them with their messages."""

    answered: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    """Kind and outcome, such as `deadline: DEADLINE_EXCEEDED`."""
    num_errors: int = 0
    errors: list[str] = field(default_factory=list)

    def add_error(self, kind: str, error: BaseException | str) -> None:
        """A call did not end as it may."""
        self.num_errors += 1
        if len(self.errors) < _MAX_ERRORS:
            name = f"{error.code.name} {error.reason} " if isinstance(error, KestrelClientError) else ""
            self.errors.append(f"{kind}: {name}{error!r}")


class MixedTraffic:
    """Callers in one event loop. The same seed has the same things asked, if not in the same order."""

    def __init__(self, address: str, seed: int = 0) -> None:
        self.tally = Tally()
        self._address = address
        self._seed = seed
        self._pictures = [chart(number, *size) for number, size in enumerate(_SIZES_PX)]
        self._pictures += [_as_png(picture) for picture in self._pictures[:3]]
        self._skills: dict[str, Ask] = {
            "Query": self._stream_query,
            "CompleteQuery": self._complete_query,
            "Query without image": self._text_query,
            "Caption": self._stream_caption,
            "CompleteCaption": self._complete_caption,
            "Point": self._point,
            "Detect": self._detect,
            "Segment": self._segment,
            "StreamSegment": self._stream_segment,
        }

    async def burst(self, num_calls: int) -> None:
        """So many calls at once, of every skill, over one connection: what grows with their number has then grown.

        Half of the pictures are new in each burst, so that whichever front end takes it decodes some.
        """
        self._seed += 1
        chance = random.Random(self._seed)
        names = list(self._skills)
        async with AsyncClient(self._address, timeout_s=WAIT_LIMIT_S, max_retry_s=0) as client:
            await asyncio.gather(
                *(self._ask(client, chance, names[number % len(names)]) for number in range(num_calls))
            )

    async def run(self, num_callers: int, duration_s: float, pause_s: float = PAUSE_S) -> None:
        """So many callers, one call after another each, until the time is over and their last calls have ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + duration_s
        self._seed += 1
        callers = [random.Random(1000 * self._seed + number) for number in range(num_callers)]
        await asyncio.gather(*(self._call_until(end, chance, pause_s) for chance in callers))

    async def _call_until(self, end: float, chance: random.Random, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            async with AsyncClient(self._address, timeout_s=WAIT_LIMIT_S, max_retry_s=0) as client:
                for _ in range(_CALLS_PER_CONNECTION):
                    if loop.time() >= end:
                        return
                    await self._misbehave_or_ask(client, chance)
                    await asyncio.sleep(min(pause_s * chance.expovariate(1), max(0.0, end - loop.time())))

    async def _misbehave_or_ask(self, client: AsyncClient, chance: random.Random) -> None:
        kind = chance.choices(("ask", "cancel", "deadline", "bad input"), (70, 12, 8, 10))[0]
        if kind == "cancel":
            await (self._cancel_stream if chance.random() < 0.5 else self._cancel_unary)(client, chance)
        elif kind == "deadline":
            await self._miss_deadline(client, chance)
        elif kind == "bad input":
            await self._send_bad_input(client, chance)
        else:
            await self._ask(client, chance, chance.choice(list(self._skills)))

    async def _ask(self, client: AsyncClient, chance: random.Random, name: str) -> None:
        try:
            await self._skills[name](client, chance)
        except KestrelClientError as error:
            self.tally.add_error(name, error)
        else:
            self.tally.answered[name] += 1

    async def _cancel_stream(self, client: AsyncClient, chance: random.Random) -> None:
        stream = client.query(self._picture(chance), chance.choice(QUESTIONS), temperature=1.0, max_tokens=200)
        last = chance.randrange(8)
        outcome = "answered"
        try:
            number = 0
            async for _ in stream.deltas():
                if number == last:
                    stream.cancel()
                    outcome = "cancelled"
                    break
                number += 1
        except KestrelClientError as error:
            self.tally.add_error("cancelled stream", error)
        else:
            self.tally.injected[f"cancelled stream: {outcome}"] += 1

    async def _cancel_unary(self, client: AsyncClient, chance: random.Random) -> None:
        name = chance.choice(list(self._skills))
        call = asyncio.ensure_future(self._skills[name](client, chance))
        await asyncio.wait((call,), timeout=chance.uniform(0.0, 0.15))
        call.cancel()
        try:
            await call
        except (asyncio.CancelledError, Cancelled):
            self.tally.injected["cancelled call: cancelled"] += 1
        except KestrelClientError as error:
            self.tally.add_error(f"cancelled {name}", error)
        else:
            self.tally.injected["cancelled call: answered"] += 1

    async def _miss_deadline(self, client: AsyncClient, chance: random.Random) -> None:
        timeout_s = 10 ** chance.uniform(-3, -0.7)
        picture, question = self._picture(chance), chance.choice(QUESTIONS)
        try:
            if chance.random() < 0.5:
                await client.complete_query(picture, question, max_tokens=200, timeout_s=timeout_s)
            else:
                await client.query(picture, question, max_tokens=200, timeout_s=timeout_s).result()
        except DeadlineExceeded:
            self.tally.injected["deadline: DEADLINE_EXCEEDED"] += 1
        except KestrelClientError as error:
            # Refused at once, because the wait would have been longer.
            if error.reason in ("QUEUE_FULL", "QUEUE_TIMEOUT"):
                self.tally.injected[f"deadline: {error.reason}"] += 1
            else:
                self.tally.add_error(f"deadline of {timeout_s:.3f} s", error)
        else:
            self.tally.injected["deadline: answered"] += 1

    async def _send_bad_input(self, client: AsyncClient, chance: random.Random) -> None:
        picture = self._picture(chance)
        cut = picture[: chance.randrange(1, len(picture) // 2)]
        kind, wanted, call = chance.choice(
            (
                ("noise", "IMAGE_DECODE_FAILED", lambda: client.complete_caption(chance.randbytes(5_000))),
                ("half a picture", "IMAGE_DECODE_FAILED", lambda: client.detect(cut, "star")),
                ("a bomb", "IMAGE_TOO_LARGE", lambda: client.point(_BOMB, "star")),
                ("no question", "INVALID_REQUEST", lambda: client.complete_query(picture, "")),
                ("a setting", "INVALID_REQUEST", lambda: client.query(picture, "What?", temperature=-1.0).result()),
                ("a model", "MODEL_NOT_FOUND", lambda: client.segment(picture, "star", model="missing")),
                ("an address", "IMAGE_URI_NOT_ALLOWED", lambda: client.detect("https://example.com/a.png", "star")),
            )
        )
        try:
            await call()
        except KestrelClientError as error:
            if error.reason == wanted:
                self.tally.injected[f"bad input, {kind}: {wanted}"] += 1
            else:
                self.tally.add_error(f"bad input, {kind}", error)
        else:
            self.tally.add_error(f"bad input, {kind}", "answered")

    async def _stream_query(self, client: AsyncClient, chance: random.Random) -> Any:
        reasoning = chance.random() < 0.3
        stream = client.query(
            self._picture(chance), chance.choice(QUESTIONS), reasoning=reasoning, max_tokens=chance.randint(1, 120)
        )
        async for _ in stream.deltas():
            if chance.random() < 0.02:
                await asyncio.sleep(0.05)  # somebody reads slowly
        return await stream.result()

    async def _complete_query(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.complete_query(self._picture(chance), chance.choice(QUESTIONS))

    async def _text_query(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.query(None, chance.choice(TEXT_QUESTIONS), temperature=1.0, max_tokens=200).result()

    async def _stream_caption(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.caption(self._picture(chance), length="long", temperature=1.0, max_tokens=100).result()

    async def _complete_caption(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.complete_caption(self._picture(chance), length="short", max_tokens=100)

    async def _point(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.point(self._picture(chance), chance.choice(_OBJECTS), max_objects=chance.randint(1, 20))

    async def _detect(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.detect(
            self._picture(chance), chance.choice(_OBJECTS), max_objects=chance.randint(1, 20)
        )

    async def _segment(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.segment(self._picture(chance), chance.choice(_OBJECTS))

    async def _stream_segment(self, client: AsyncClient, chance: random.Random) -> Any:
        return await client.stream_segment(self._picture(chance), chance.choice(_OBJECTS)).result()

    def _picture(self, chance: random.Random) -> bytes:
        """Often small, seldom large. Half of the pictures are new, so that caches have hits and misses."""
        picture = chance.choices(self._pictures, (20, 20, 20, 15, 5, 2, 10, 10, 10))[0]
        if chance.random() < 0.5 or not picture.startswith(_JPEG):
            return picture
        comment = chance.randbytes(16)
        return picture[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + picture[2:]


_JPEG = b"\xff\xd8"


def _as_png(picture: bytes) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(picture)).save(file, "PNG")
    return file.getvalue()


def _bomb() -> bytes:
    """A PNG of a few bytes that says it has 20,000 by 20,000 pixels."""
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = (20_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


_BOMB = _bomb()
