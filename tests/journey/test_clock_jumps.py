"""The wall clock jumps by an hour under a running server, and no deadline and no rate is touched by it."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.access.token_file import hash_of
from tests.journey.http2 import QUERY, Http2Client
from tests.journey.serving_process import ServingProcess, serving_process
from tests.journey.test_cancellation import endless

HOUR_S = 3_600
BEARER, RARE_BEARER = "a secret hard to guess", "another secret hard to guess"
QUICK = wire.CompleteQueryRequest(question="hi", sampling={"max_tokens": 2})


@dataclass(frozen=True)
class Clock:
    """The wall clock of one server."""

    offset: Path

    def jump(self, seconds: int) -> None:
        self.offset.write_text(str(seconds))


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServingProcess, Clock]]:
    """A server whose wall clock can be set, alone. One of its tokens may call twice, and then once in an hour."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("clock")
    library, source = folder / "wall_clock.so", Path(__file__).with_name("wall_clock.c")
    subprocess.run((compiler, "-shared", "-fPIC", "-O1", "-o", library, source), check=True)
    clock = Clock(folder / "offset")
    clock.jump(0)
    tokens = folder / "tokens.toml"
    tokens.write_text(
        f'busy = {{ sha256 = "{hash_of(BEARER).hex()}", scopes = ["infer"] }}\n'
        f'rare = {{ sha256 = "{hash_of(RARE_BEARER).hex()}", scopes = ["infer"], '
        f"rate = {1 / HOUR_S}, burst = 2 }}\n"
    )
    env = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(clock.offset)}
    with serving_process("--tokens", str(tokens), env=env) as server:
        yield server, clock


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
async def test_deadlines_and_rates_do_not_follow_the_wall_clock(shifted: tuple[ServingProcess, Clock], jump_s: int):
    server, clock = shifted
    metadata = (("authorization", f"Bearer {BEARER}"),)
    async with grpc.aio.insecure_channel(server.address) as channel:
        ask = VisionServiceStub(channel)
        # A deadline far away, and one that comes: the first must not come early, the second not late.
        patient = ask.Query(endless(1), metadata=metadata, timeout=600)
        await patient.read()
        async with Http2Client.connected(server.address) as client:
            began = time.monotonic()
            # Nothing on our side ends this call: only the server watches its deadline.
            stream = await client.ask(QUERY, endless(2), authorization=f"Bearer {BEARER}", grpc_timeout="1S")
            await client.acknowledge(await client.next_data())
            clock.jump(jump_s)
            _, trailers = await client.read(stream)
            assert trailers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
            assert time.monotonic() - began < 60
        for _ in range(5):
            await patient.read()
        assert not patient.done()
        patient.cancel()
        # The clock stays where it is now; who comes now has as much time as before.
        assert await ask.CompleteQuery(QUICK, metadata=metadata, timeout=30)
    clock.jump(0)


async def test_a_rate_is_not_refilled_by_a_jump(shifted: tuple[ServingProcess, Clock]):
    server, clock = shifted
    async with grpc.aio.insecure_channel(server.address) as channel:

        async def ask() -> grpc.StatusCode:
            call = VisionServiceStub(channel).CompleteQuery
            return await call(QUICK, metadata=(("authorization", f"Bearer {RARE_BEARER}"),)).code()

        refused = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [await ask() for _ in range(3)] == [grpc.StatusCode.OK, grpc.StatusCode.OK, refused]
        for jump_s in (HOUR_S, -HOUR_S, 0):
            clock.jump(jump_s)
            assert await ask() is refused
