"""Something of ours raises, at each stage that a request goes through: that request ends, and no other notices."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.multiprocess.engine_channel import engine_client
from kestrel_runtime.engine import preprocessing
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.fairness.queue_admission import QueueAdmission
from kestrel_runtime.models.moondream.skills.query import QuerySkill
from tests.journey.conftest import LiveServer
from tests.journey.test_bad_input import error_of
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.engine import test_isolation as isolation

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
# As `isolation.POISON`, which stages of the engine are made to fail for.
POISON = wire.CompleteQueryRequest(
    question="poison",
    image={"data": IMAGE},
    sampling={"temperature": 5.0, "max_tokens": 40, "seed": 9},
    options={"cache": "CACHE_POLICY_BYPASS"},
)
Break = Callable[[pytest.MonkeyPatch], None]


def fails_once(owner: Any, name: str, error: Exception) -> Break:
    """The first call of a function raises."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def raising(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(owner, name, original)
            raise error

        monkeypatch.setattr(owner, name, raising)

    return apply


def fails_to_decode(error: Exception) -> Break:
    """Has the decoding of an image fail, in the engine or in the front end that decodes for it."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        for owner in (preprocessing, engine_client):
            fails_once(owner, "decode_image", error)(monkeypatch)

    return apply


def fails_for_poison(stage: isolation.Stage, error: Exception, after: int = 0) -> Break:
    return lambda monkeypatch: isolation.poison(monkeypatch, stage, error, after=after)


def fails_to_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    new_parser = QuerySkill.new_parser

    def broken(self: QuerySkill, request: Any, *context: Any) -> Any:
        made = new_parser(self, request, *context)
        if request.sampling == isolation.POISON.sampling:
            monkeypatch.setattr(made, "consume", lambda token: 1 / 0)
        return made

    monkeypatch.setattr(QuerySkill, "new_parser", broken)


INTERNAL, UNAVAILABLE = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE
STAGES: dict[str, tuple[Break, grpc.StatusCode]] = {
    "queue": (fails_once(QueueAdmission, "enter", ValueError("secret")), INTERNAL),
    "no thread": (fails_once(Preprocessor, "submit", RuntimeError("can't start new thread")), UNAVAILABLE),
    "preprocess": (fails_to_decode(RuntimeError("secret")), INTERNAL),
    "preprocess, out of memory": (fails_to_decode(MemoryError()), INTERNAL),
    "encode": (fails_for_poison(isolation.ENCODE, RuntimeError("secret")), INTERNAL),
    "prefill": (fails_for_poison(isolation.PREFILL, RuntimeError("secret")), INTERNAL),
    "prefill, out of memory": (fails_for_poison(isolation.PREFILL, torch.OutOfMemoryError("secret")), INTERNAL),
    "decode": (fails_for_poison(isolation.DECODE, RuntimeError("secret"), 5), INTERNAL),
    "decode, out of memory": (fails_for_poison(isolation.DECODE, torch.OutOfMemoryError("secret"), 5), INTERNAL),
    "parse": (fails_to_parse, INTERNAL),
}


OVER_SOCKETS = ("queue", "no thread", "preprocess", "preprocess, out of memory", "prefill")
"""Of the stages that follow in the engine, one shows how an error comes over sockets."""


@pytest.mark.parametrize(
    ("live_server", "stage"),
    [*(("one process", stage) for stage in STAGES), *(("over sockets", stage) for stage in OVER_SOCKETS)],
    indirect=["live_server"],
)
async def test_an_exception_at_any_stage_ends_its_own_request_alone(
    live_server: LiveServer, monkeypatch: pytest.MonkeyPatch, stage: str
):
    fail, expected_code = STAGES[stage]
    # They run all the while; the one that fails joins them midway.
    request = wire.QueryRequest(question="hello", sampling={"temperature": 5.0, "max_tokens": 60, "seed": 3})
    others = [aiter(live_server.stub.Query(request)) for _ in range(3)]
    await asyncio.gather(*(anext(events) for events in others))
    fail(monkeypatch)
    code, reason, _ = await error_of(live_server.stub.CompleteQuery(POISON))
    assert code is expected_code
    assert reason == ("INTERNAL" if code is INTERNAL else "ENGINE_UNAVAILABLE")
    answers = [[event async for event in events][-1].completed.answer for events in others]
    assert len(set(answers)) == 1
    assert answers[0]
    monkeypatch.undo()
    await live_server.assert_empty()
