"""Conversations with several pictures: the answers of the fixtures, and the same answer however it is computed."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.events import Finished, QueryOutput
from kestrel_runtime.api.requests import Chat, ChatMessage, Query, Request, Role, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.verify.answers import answer_differs, answer_of
from tests.over_sockets import behind_sockets
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL
from tests.runtime.models.moondream.engines import served

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
PICTURES = [path.read_bytes() for folder in (MD3_SMALL, MD2_SMALL) for path in sorted(folder.glob("image_*.png"))]
PAGE_SIZE = 16


def user(text: str, *pictures: bytes) -> ChatMessage:
    return ChatMessage(Role.USER, text, pictures)


def assistant(text: str) -> ChatMessage:
    return ChatMessage(Role.ASSISTANT, text)


# The fixtures ------------------------------------------------------------------------------------------


def fixture_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "conversations.json").read_text(encoding="utf-8"))


def chat_of(folder: Path, conversation: dict[str, Any], max_tokens: int) -> Chat:
    messages = [
        ChatMessage(
            Role(message["role"]),
            message["text"],
            tuple((folder / name).read_bytes() for name in message.get("images", ())),
        )
        for message in conversation["messages"]
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Chat(tuple(messages), reasoning=conversation["reasoning"], sampling=sampling)


@pytest.mark.parametrize(
    ("folder", "model"), [(MD2_SMALL, "moondream2"), (MD3_SMALL, "moondream3")], ids=["2", "3"]
)
async def test_conversations_are_answered_as_they_are_defined(
    folder: Path, model: str, request: pytest.FixtureRequest
):
    """Without the cache; with it `kestrel-grpc verify` asks the same, in the tests of the acceptance."""
    fixture, loaded = fixture_of(folder), request.getfixturevalue(model)
    conversations = fixture["conversations"]
    requests = [chat_of(folder, conversation, fixture["max_tokens"]) for conversation in conversations]
    async with served(loaded, prefix_cache=False, num_kv_pages=640) as engine:
        finished = await asyncio.gather(*(answer(engine, request) for request in requests))
    complaints = [
        f"{conversation['name']}: {difference}"
        for conversation, item in zip(conversations, finished, strict=True)
        if (difference := answer_differs(answer_of(item.output), conversation["expect"]))
    ]
    assert complaints == []
    for conversation, item in zip(conversations, finished, strict=True):
        num_pictures = sum(isinstance(part, str) for part in conversation["prompt"])
        assert item.usage.num_image_tokens == 729 * num_pictures
        assert item.usage.num_input_tokens == len(conversation["prompt"]) + 728 * num_pictures
        assert item.usage.num_output_tokens == len(conversation["tokens"])


# One answer, however it is computed ----------------------------------------------------------------------


async def answer(engine: Engine, request: Request) -> Finished:
    (stream,) = engine.submit_samples(request)
    return await stream.result()


def answer_text(finished: Finished) -> str:
    assert isinstance(finished.output, QueryOutput)
    return finished.output.answer


QUESTIONS: Sequence[Sequence[ChatMessage]] = (
    # The questions of each conversation, in turn; the model's answers stand between them.
    (user("What is in these images?", *PICTURES[:2]), user("And here?", PICTURES[2]), user("Which one is a copy?")),
    (user("Hello."), user("What is in this image?", PICTURES[0]), user("And in these?", PICTURES[3], PICTURES[0])),
    (user("License?", PICTURES[4], PICTURES[4]), user("Again?", PICTURES[4]), user("Who says so?", PICTURES[5])),
    (user("What is in these images?", *PICTURES[:2]), user("And there?", PICTURES[3])),
)
SYSTEM = ChatMessage(Role.SYSTEM, "Answer in one word.")


def last_turns(number: int) -> list[list[ChatMessage]]:
    """The questions of a conversation so far, for each of its turns."""
    return [list(QUESTIONS[number][: turn + 1]) for turn in range(len(QUESTIONS[number]))]


def chat(questions: Sequence[ChatMessage], answers: Sequence[str], *, reasoning: bool = False) -> Chat:
    messages = [SYSTEM]
    for place, question in enumerate(questions):
        messages.append(question)
        if place < len(answers):
            messages.append(assistant(answers[place]))
    return Chat(tuple(messages), reasoning=reasoning, sampling=GREEDY)


async def turn_by_turn(engine: Engine, number: int) -> list[Finished]:
    """Asks each question of a conversation after the answer to the one before it."""
    found: list[Finished] = []
    for questions in last_turns(number):
        found.append(await answer(engine, chat(questions, [answer_text(item) for item in found])))
    return found


ALL = tuple(range(len(QUESTIONS)))


async def in_turns(engine: Engine, numbers: Sequence[int] = ALL) -> list[list[Finished]]:
    """Conversations together, each turn by turn."""
    return await asyncio.gather(*(turn_by_turn(engine, number) for number in numbers))


def outputs(conversations: Sequence[Sequence[Finished]]) -> list[list[object]]:
    return [[item.output for item in turns] for turns in conversations]


def without_probabilities(conversations: Sequence[Sequence[object]]) -> list[list[object]]:
    """The same answers with the ids of their tokens alone: in float32 the last bits depend on the batch."""
    return [[_ids(output) for output in turns] for turns in conversations]


def _ids(output: object) -> object:
    assert isinstance(output, QueryOutput)
    assert output.logprobs is not None
    return output.answer, [token.id for token in output.logprobs]


@pytest.fixture(scope="module", params=["shallow2", "shallow3"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return request.getfixturevalue(request.param)


async def at_once(loaded: LoadedModel) -> list[list[object]]:
    """The answers of an engine without caches that computes one request at a time, each conversation anew."""
    async with served(loaded, prefix_cache=False, image_cache_bytes=0, max_batch_size=1) as engine:
        return outputs([await turn_by_turn(engine, number) for number in range(len(QUESTIONS))])


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[object]]:
    return without_probabilities(asyncio.run(at_once(loaded)))


def test_the_answers_depend_on_every_picture(expected: list[list[object]]):
    answers = [str(output) for turns in expected for output in turns]
    assert len(set(answers)) == len(answers) - 1, "two conversations begin alike"
    assert expected[0][0] == expected[3][0]


async def test_turn_by_turn_with_the_cache_every_answer_is_that_of_the_whole_without_it(
    loaded: LoadedModel, expected: list[list[object]]
):
    async with served(loaded) as engine:
        first = await in_turns(engine)
        again = await in_turns(engine)
        load = engine.load()
    assert without_probabilities(outputs(first)) == expected
    assert without_probabilities(outputs(again)) == expected
    assert load.num_used_pages == 0
    for turns in first:
        for before, item in itertools.pairwise(turns):
            found, whole = item.usage.num_cached_tokens, before.usage.num_input_tokens
            # All whole pages of the turn before but its last position, and at least its pictures.
            assert found >= (whole - 1) // PAGE_SIZE * PAGE_SIZE
            assert found < item.usage.num_input_tokens
    for turns in again:
        for item in turns:
            assert item.usage.num_cached_tokens >= (item.usage.num_input_tokens - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": False},
        {"image_cache_bytes": 0},
        {"max_prefill_tokens": 7, "max_batch_size": 2},
        {"max_prefill_tokens": 100, "max_crops_per_step": 1},
        {"num_kv_pages": 34, "max_batch_size": 4, "max_prefill_tokens": 64, "max_crops_per_step": 1},
        {"num_kv_pages": 34, "prefix_cache": False, "page_size": 16},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
async def test_every_way_to_schedule_conversations_gives_the_same_answers(
    loaded: LoadedModel, expected: list[list[object]], settings: dict[str, Any]
):
    async with served(loaded, **settings) as engine:
        for _ in range(2):
            assert without_probabilities(outputs(await in_turns(engine))) == expected
        load = engine.load()
    assert (load.num_used_pages, load.num_running, load.num_waiting) == (0, 0, 0)
    if "num_kv_pages" in settings and settings.get("prefix_cache", True):
        assert load.prefix_cache.num_evictions > 0


async def test_conversations_that_are_preempted_go_on_with_the_same_answers(
    shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    request = chat(last_turns(0)[0], [])
    long = replace(request, sampling=replace(GREEDY, max_tokens=60, logit_bias=((0, -100.0),)))
    requests = [replace(long, messages=(*long.messages[:-1], user(text, *PICTURES[:2]))) for text in "abcdef"]
    async with served(shallow3, prefix_cache=False, max_batch_size=1) as engine:
        wanted = [_ids((await answer(engine, item)).output) for item in requests]
    preempted: list[object] = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, each: (preempted.append(each), preempt(self, each)))
    for prefix_cache in (False, True):
        preempted.clear()
        few = {"num_kv_pages": 100, "page_size": 4, "max_batch_size": 8}
        async with served(shallow3, prefix_cache=prefix_cache, **few) as engine:
            found = await asyncio.gather(*(answer(engine, item) for item in requests))
        assert [_ids(item.output) for item in found] == wanted
        assert preempted


async def test_over_sockets_the_answers_are_the_same(shallow2: LoadedModel, tmp_path: Path):
    wanted = without_probabilities(await at_once(shallow2))
    async with served(shallow2) as engine, behind_sockets(engine, tmp_path) as client:
        for _ in range(2):
            assert without_probabilities(outputs(await in_turns(client))) == wanted


async def test_deterministic_conversations_have_the_same_bits_whatever_is_cached_or_runs_beside_them(
    shallow3_folder: Path,
):
    numbers = (3,)
    config = EngineConfig(str(shallow3_folder), dtype="float32", device="cpu", deterministic=True)
    alone = await asyncio.to_thread(
        LocalEngine.start, replace(config, prefix_cache=False, image_cache_bytes=0, max_batch_size=1)
    )
    try:
        wanted = outputs([await turn_by_turn(alone, number) for number in numbers])
    finally:
        alone.close()
    busy = await asyncio.to_thread(LocalEngine.start, replace(config, max_prefill_tokens=100))
    try:
        other = asyncio.create_task(answer(busy, Query("What?", PICTURES[1], sampling=GREEDY)))
        for _ in range(2):  # the second time everything is cached
            assert outputs(await in_turns(busy, numbers)) == wanted
        await other
    finally:
        busy.close()
