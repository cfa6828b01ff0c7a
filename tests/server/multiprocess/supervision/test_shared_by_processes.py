"""What several processes of front ends hold as one: limits of tokens, stored images, operators' calls, files."""

import asyncio
import functools
import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kestrel_client.v1 import engine_service_pb2, image_service_pb2, media_pb2, vision_service_pb2
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.cli.bench.workload import chart
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as triton_wire
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Chat, ChatMessage, Role, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from tests.reference_fixtures import CHECKOUT
from tests.server.certificates import Pair, replace, trusting
from tests.server.multiprocess.supervision.host_process import MAX_WAIT_S, HostProcess, host_process
from tests.server.serving import reason_of
from tests.server.triton_calls import TritonStub, query

pytestmark = pytest.mark.usefixtures("warm_starts")

NUM_CONNECTIONS = 24
"""Linux gives each to one of two front ends: that one gets none has a chance of one in 8 million."""
IMAGE = (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()
IMAGE_TOKENS = 256
"""Of the built-in model."""
IMAGE_ID = f"sha256:{hashlib.sha256(IMAGE).hexdigest()}"
SERVER_INFO = engine_service_pb2.GetServerInfoRequest()
LIMITS = {
    "rated": ", rate = 0.001, burst = 25",
    "holding": ", concurrency = 6",
    "asked": ", rate = 1000",
    "alone": ", concurrency = 1",
    "plain": "",
    "other": "",
}
Outcome = Callable[["Connection"], Awaitable[str]]


@dataclass(frozen=True)
class Host:
    process: HostProcess
    tokens: Path
    pair: Pair
    authority: trustme.CA

    def write_tokens(self, names: Sequence[str] = tuple(LIMITS)) -> None:
        lines = (line_for(name, name, frozenset(Scope)).replace(" }", f"{LIMITS[name]} }}") for name in names)
        replace(self.tokens, "\n".join(lines).encode())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Two front ends of one engine, with tokens and encryption."""
    folder = tmp_path_factory.mktemp("host")
    pair, authority = Pair.within(folder), trustme.CA()
    pair.write(authority)
    tokens = folder / "tokens.toml"
    Host(None, tokens, pair, authority).write_tokens()  # pyrefly: ignore[bad-argument-type]
    options = ("--frontends", "2", "--devices", "cpu", "--tokens", str(tokens), "--triton", "on")
    encryption = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    # An upload that is begun waits for a place for its message, and then for its message.
    places = ("--max-receiving-bytes", "2047M", "--max-message-bytes", "33M", "--receive-timeout", "600")
    with host_process(*options, *encryption, *places) as process:
        assert process.address
        yield Host(process, tokens, pair, authority)
        assert process.end() == 0
        assert process.complaints == []


class Connection:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.vision: Any = VisionServiceStub(channel)
        self.images: Any = ImageServiceStub(channel)
        self.engine: Any = EngineServiceStub(channel)
        self.health: Any = HealthStub(channel)
        self.triton: Any = TritonStub(channel)


@asynccontextmanager
async def connections(host: Host, authority: trustme.CA | None = None) -> AsyncIterator[list[Connection]]:
    """Some to each front end."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    address, credentials = host.process.address, trusting(authority or host.authority)
    channels = [grpc.aio.secure_channel(address, credentials, options) for _ in range(NUM_CONNECTIONS)]
    try:
        yield [Connection(channel) for channel in channels]
    finally:
        for channel in channels:
            await channel.close()


def bearing(name: str) -> Any:
    return (("authorization", f"Bearer {name}"),)


async def outcome(call: Any) -> str:
    """OK, or the reason of an error, or its status where no server has given a reason."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        try:
            return reason_of(error)
        except AssertionError:
            return error.code().name
    return "OK"


async def all_outcomes(every: Sequence[Connection], ask: Outcome) -> Counter[str]:
    return Counter(await asyncio.gather(*(ask(connection) for connection in every)))


async def until(every: Sequence[Connection], ask: Outcome, wanted: str) -> None:
    """Ask over every connection until all answers are what is wanted."""
    async with asyncio.timeout(MAX_WAIT_S):
        while await all_outcomes(every, ask) != {wanted: len(every)}:
            pass


async def reloaded(host: Host, write: Callable[[], None]) -> None:
    """Write files that both front ends read again."""
    behind = len(host.process.lines)
    write()
    wait = functools.partial(host.process.wait_for_each, "reloaded", ("frontend-0", "frontend-1"), behind=behind)
    await asyncio.to_thread(wait)


def server_info(name: str) -> Outcome:
    return lambda connection: outcome(connection.engine.GetServerInfo(SERVER_INFO, metadata=bearing(name)))


def about_image(name: str) -> Outcome:
    request = vision_service_pb2.CompleteQueryRequest(
        question="?", image=media_pb2.Image(image_id=IMAGE_ID), sampling={"max_tokens": 1}
    )
    return lambda connection: outcome(connection.vision.CompleteQuery(request, metadata=bearing(name)))


def over_triton(name: str) -> Outcome:
    request = query(IMAGE=IMAGE, MAX_TOKENS=1)
    return lambda connection: outcome(connection.triton.ModelInfer(request, metadata=bearing(name)))


async def put(connection: Connection, name: str, **fields: Any) -> str:
    request = image_service_pb2.PutImageRequest(data=IMAGE, **fields)
    return await outcome(connection.images.PutImage(request, metadata=bearing(name)))


async def test_a_rate_holds_exactly_over_all_processes(host: Host) -> None:
    async with connections(host) as every:
        found = await all_outcomes([*every, *every, *every], server_info("rated"))
        assert found == {"OK": 25, "RATE_LIMITED": 3 * NUM_CONNECTIONS - 25}


async def test_a_caller_with_one_call_at_a_time_is_never_refused_whichever_process_it_calls_next(
    host: Host,
) -> None:
    async with connections(host) as every:
        for _ in range(10):
            for connection in every:
                assert await server_info("alone")(connection) == "OK"


CONVERSATION = (
    ("What color is the star?", (IMAGE,)),
    ("What shapes do you see in this one?", (chart(0, 300, 200),)),
    ("How many shapes are there?", ()),
)
"""Questions with their pictures."""


async def answers_of_one_process() -> list[str]:
    engine = await asyncio.to_thread(
        LocalEngine.start, EngineConfig(device="cpu", prefix_cache=False, image_cache_bytes=0)
    )
    try:
        messages: list[ChatMessage] = []
        for question, pictures in CONVERSATION:
            messages.append(ChatMessage(Role.USER, question, pictures))
            chat = Chat(tuple(messages), sampling=SamplingParams(temperature=0.0, max_tokens=8))
            output: Any = (await engine.submit(chat).result()).output
            messages.append(ChatMessage(Role.ASSISTANT, output.answer))
        return [message.text for message in messages if message.role is Role.ASSISTANT]
    finally:
        engine.close()


async def test_a_conversation_whose_turns_reach_any_front_end_is_answered_as_by_one_process(host: Host) -> None:
    async def talk(by_turn: Sequence[Connection]) -> list[str]:
        wire = vision_service_pb2
        request = wire.CompleteChatRequest(sampling={"temperature": 0.0, "max_tokens": 8})
        answers: list[str] = []
        for connection, (question, pictures) in zip(by_turn, CONVERSATION, strict=True):
            asked = request.messages.add(role=wire.CHAT_ROLE_USER)
            asked.parts.extend(wire.ChatPart(image={"data": picture}) for picture in pictures)
            asked.parts.add(text=question)
            result = (await connection.vision.CompleteChat(request, metadata=bearing("plain"))).result
            before = sum(len(shown) for _, shown in CONVERSATION[: len(answers)])
            assert result.info.usage.cached_token_count >= before * IMAGE_TOKENS, "the turn before it is cached"
            answers.append(result.answer)
            request.messages.add(role=wire.CHAT_ROLE_ASSISTANT).parts.add(text=result.answer)
        return answers

    wanted = await answers_of_one_process()
    async with connections(host) as every:
        found = await asyncio.gather(*(talk(every[first : first + 3]) for first in range(0, 12, 3)))
    assert found == [wanted] * 4


class Uploads:
    """Uploads that are begun and not finished: each holds a place of its token."""

    def __init__(self) -> None:
        self.open: dict[asyncio.Task[str], Any] = {}

    async def fill(self, every: Sequence[Connection], limit: int) -> None:
        """Begin uploads over all connections until so many are open. Those that are refused are begun again."""
        async with asyncio.timeout(MAX_WAIT_S):
            while True:
                for connection in every:
                    call = connection.images.UploadImage(metadata=bearing("holding"))
                    self.open[asyncio.ensure_future(outcome(call))] = call
                while len(self.open) > limit:
                    await self._one_ended()
                if len(self.open) == limit:
                    return

    async def _one_ended(self) -> None:
        done, _ = await asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self.open[task]
            assert task.result() in ("RATE_LIMITED", "UNAVAILABLE")

    async def hang_up(self) -> None:
        for call in self.open.values():
            call.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)
        self.open.clear()


async def test_calls_at_a_time_hold_exactly_and_a_process_that_is_killed_gives_its_places_back(host: Host) -> None:
    refused: dict[str, int] = {"RATE_LIMITED": NUM_CONNECTIONS}
    uploads = Uploads()
    async with connections(host) as every:
        await uploads.fill(every, 6)
        assert await all_outcomes(every, server_info("holding")) == refused
        assert len(uploads.open) == 6
        await uploads.hang_up()
        await uploads.fill(every, 6)
        host.process.kill("kestrel-grpc frontend 0")
        await asyncio.to_thread(host.process.wait_for, "frontend-0.2 is ready")
    await uploads.hang_up()
    async with connections(host) as every:
        await uploads.fill(every, 6)
        assert await all_outcomes(every, server_info("holding")) == refused
        await uploads.hang_up()


async def test_a_stored_image_is_one_image_to_all_processes(host: Host) -> None:
    async with connections(host) as every:
        assert await put(every[0], "plain") == "OK"
        assert await all_outcomes(every, about_image("plain")) == {"OK": NUM_CONNECTIONS}
        assert await all_outcomes(every, about_image("other")) == {"IMAGE_NOT_FOUND": NUM_CONNECTIONS}
        delete = image_service_pb2.DeleteImageRequest(image_id=IMAGE_ID)
        assert await outcome(every[1].images.DeleteImage(delete, metadata=bearing("plain"))) == "OK"
        assert await all_outcomes(every, about_image("plain")) == {"IMAGE_NOT_FOUND": NUM_CONNECTIONS}
        assert await put(every[2], "plain", ttl=Duration(nanos=1)) == "OK"
        assert await all_outcomes(every, about_image("plain")) == {"IMAGE_NOT_FOUND": NUM_CONNECTIONS}


async def test_an_operator_cancels_the_requests_of_all_processes(host: Host) -> None:
    async with connections(host) as every:
        # So random that the model hardly finds an end.
        sampling = {"temperature": 50.0, "top_p": 1.0, "max_tokens": 3000}
        request = vision_service_pb2.CompleteQueryRequest(question="hello", sampling=sampling)
        calls = [
            asyncio.ensure_future(outcome(one.vision.CompleteQuery(request, metadata=bearing("other"))))
            for one in every
        ]
        cancel = engine_service_pb2.CancelRequestsRequest(token="other")
        num_cancelled = 0
        while not all(call.done() for call in calls):
            answer = await every[0].engine.CancelRequests(cancel, metadata=bearing("plain"))
            num_cancelled += answer.cancelled_request_count
        found = Counter(call.result() for call in calls)
        assert found["REQUEST_CANCELLED"] == num_cancelled
        assert found["REQUEST_CANCELLED"] + found["OK"] == NUM_CONNECTIONS
        assert num_cancelled > 0.8 * NUM_CONNECTIONS


async def test_all_processes_are_one_server_and_count_together(host: Host) -> None:
    async with connections(host) as every:
        answers = [await one.engine.GetServerInfo(SERVER_INFO, metadata=bearing("plain")) for one in every]
        assert len({answer.instance_id for answer in answers}) == 1
        before = {(await statistics(one)).inference_count for one in every}
        assert len(before) == 1
        assert await all_outcomes(every, over_triton("plain")) == {"OK": NUM_CONNECTIONS}
        assert {(await statistics(one)).inference_count for one in every} == {before.pop() + NUM_CONNECTIONS}


async def statistics(connection: Connection) -> Any:
    request = triton_wire.ModelStatisticsRequest()
    answer = await connection.triton.ModelStatistics(request, metadata=bearing("plain"))
    return answer.model_stats[0]


async def test_an_image_whose_time_is_over_leaves_the_store_and_the_caches_of_the_engine(host: Host) -> None:
    async def used() -> dict[tuple[str, str], float]:
        """The bytes of each cache, by its process and its tier."""
        metrics = await asyncio.to_thread(host.process.metrics)
        samples = metrics["kestrel_cache_used_bytes"].samples
        return {(sample.labels.get("process", "engine"), sample.labels["tier"]): sample.value for sample in samples}

    async with connections(host) as every:
        request = engine_service_pb2.ClearCacheRequest()
        assert await outcome(every[0].engine.ClearCache(request, metadata=bearing("plain"))) == "OK"
        assert (await used())["engine", "embeddings"] == 0
        for seconds in (1, 8, 64):  # longer where the machine is too busy to ask in time
            assert await put(every[0], "asked", ttl=Duration(seconds=seconds)) == "OK"
            is_found = await about_image("asked")(every[1]) == "OK"
            if is_found and (await used())["engine", "embeddings"] > 0:
                break
        else:
            raise AssertionError("no question about the image was answered within its time")
        async with asyncio.timeout(MAX_WAIT_S):
            while (await used())["engine", "embeddings"] > 0:
                pass
        assert await all_outcomes(every, about_image("asked")) == {"IMAGE_NOT_FOUND": NUM_CONNECTIONS}
        assert {process for process, tier in await used() if tier == "stored_images"} == {"supervisor"}


async def test_health_follows_the_engine_in_all_processes(host: Host) -> None:
    async with connections(host) as every:
        watches = [connection.health.Watch(HealthCheckRequest(), timeout=MAX_WAIT_S) for connection in every]

        async def told() -> set[str]:
            """What the next message of each watch says."""
            messages = await asyncio.gather(*(watch.read() for watch in watches))
            return {HealthCheckResponse.ServingStatus.Name(message.status) for message in messages}

        assert await told() == {"SERVING"}
        host.process.kill("kestrel-grpc core 0")
        assert await told() == {"NOT_SERVING"}
        assert await told() == {"SERVING"}
        assert await all_outcomes(every, server_info("plain")) == {"OK": NUM_CONNECTIONS}
        for watch in watches:
            watch.cancel()


async def test_tokens_are_read_again_by_all_processes(host: Host) -> None:
    async with connections(host) as every:
        await reloaded(host, lambda: host.write_tokens(("plain", "rated", "holding", "asked")))
        assert await all_outcomes(every, server_info("other")) == {"TOKEN_INVALID": NUM_CONNECTIONS}
        await reloaded(host, host.write_tokens)
        assert await all_outcomes(every, server_info("other")) == {"OK": NUM_CONNECTIONS}


async def test_a_supervisor_that_does_not_answer_fails_calls_with_limits_in_time_and_no_others(host: Host) -> None:
    async with connections(host) as every:
        assert await all_outcomes(every, server_info("asked")) == {"OK": NUM_CONNECTIONS}
        os.kill(host.process.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert await all_outcomes(every, server_info("asked")) == {"ENGINE_UNAVAILABLE": NUM_CONNECTIONS}
            assert time.monotonic() - began < MAX_WAIT_S / 2
            assert await all_outcomes(every, server_info("plain")) == {"OK": NUM_CONNECTIONS}
            assert await put(every[0], "plain") == "ENGINE_UNAVAILABLE"
        finally:
            os.kill(host.process.process.pid, signal.SIGCONT)
        await until(every, server_info("asked"), "OK")


async def test_certificates_are_read_again_by_all_processes(host: Host) -> None:
    for authority in (trustme.CA(), host.authority):
        await reloaded(host, lambda authority=authority: host.pair.write(authority))
        async with connections(host, authority) as every:
            assert await all_outcomes(every, server_info("plain")) == {"OK": NUM_CONNECTIONS}
