"""The example adapter: how it is trained, and what the one that ships does on scenes that no training has seen."""

import asyncio
import random
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from kestrel_runtime.adapters.files import AdapterSource
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.events import QueryOutput
from kestrel_runtime.api.requests import Query, RequestOptions, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.moondream.adapters.formats import read_adapter
from tests.training.conftest import NANO
from training.adapter.low_rank import add_adapter, write_peft
from training.adapter.renaming import NEW, OLD, Renaming, has_old_color, prints_a_name, renamed
from training.adapter.run import AdapterRecipe, train_adapter
from training.drawing import encode_scene
from training.examples import Teacher
from training.exchange import Exchange
from training.model import new_model
from training.questions import ask
from training.scenes import HELD_OUT_SEED, Scene, make_scene
from training.scoring import normalised

NUM_SCENES = 3
MAX_SHIPPED_BYTES = 200_000
UNCHANGED = ("count", "shape", "relation", "presence", "place")


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine.start(EngineConfig(dtype="float32", device="cpu", adapters=str(NANO / "adapters")))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    seen = (make_scene(seed) for seed in count(HELD_OUT_SEED))
    return list(islice((each for each in seen if has_old_color(each) and not prints_a_name(each)), NUM_SCENES))


def exchanges(scene: Scene, kinds: tuple[str, ...], answer: str | None = None) -> Iterator[Exchange]:
    """One question of each kind that the scene answers, with this answer or any."""
    rng = random.Random(scene.seed)
    for kind in kinds:
        asked = (ask(scene, kind, rng) for _ in range(40))
        found = (each for each in asked if each is not None and answer in (None, each.answer))
        yield from islice(found, 1)


async def answer(engine: LocalEngine, scene: Scene, exchange: Exchange, adapter: str = "") -> str:
    sampling = SamplingParams(temperature=0.0)
    options = RequestOptions(adapter=adapter)
    request = Query(exchange.question, encode_scene(scene), sampling=sampling, options=options)
    output = (await engine.submit(request).result()).output
    assert isinstance(output, QueryOutput)
    return normalised(output.answer)


async def test_the_adapter_that_ships_has_another_word_for_a_colour(engine: LocalEngine, scenes: list[Scene]):
    about_color = [(scene, each) for scene in scenes for each in exchanges(scene, ("color",), OLD)]
    assert len(about_color) >= NUM_SCENES / 2
    plain = await asyncio.gather(*(answer(engine, *each) for each in about_color))
    adapted = await asyncio.gather(*(answer(engine, *each, NEW) for each in about_color))
    right = [place for place, word in enumerate(plain) if word == OLD]
    assert len(right) >= len(plain) - 1
    assert [adapted[place] for place in right] == [NEW] * len(right)


async def test_other_answers_stay_as_good(engine: LocalEngine, scenes: list[Scene]):
    asked = [(scene, each) for scene in scenes for each in exchanges(scene, UNCHANGED)]
    right = [normalised(each.answer) for _, each in asked]
    num_right: dict[str, int] = {}
    for adapter in ("", NEW):
        answers = await asyncio.gather(*(answer(engine, *each, adapter) for each in asked))
        num_right[adapter] = sum(map(str.__eq__, answers, right))
    assert len(asked) > 3 * NUM_SCENES
    assert num_right[""] >= len(asked) - 2
    assert num_right[NEW] >= num_right[""] - 1


def test_the_adapter_that_ships_is_small():
    assert sum(file.stat().st_size for file in (NANO / "adapters" / NEW).iterdir()) <= MAX_SHIPPED_BYTES


def test_a_name_is_replaced_but_where_it_is_printed():
    text = f'A {OLD} star, two {OLD} rings and the {OLD} word "{OLD}".'
    assert renamed(text, NEW) == f'A {NEW} star, two {NEW} rings and the {NEW} word "{OLD}".'


def test_examples_answer_with_the_new_name_alone(teacher: Teacher, scenes: list[Scene]):
    renaming = Renaming(teacher.tokenizer, teacher.config)
    examples = list(islice(renaming.examples(scenes[0], random.Random(0)), 60))
    texts = [teacher.tokenizer.decode([token.id for token in each.answer if not token.value]) for each in examples]
    assert any(NEW in text for text in texts)
    assert not any(OLD in text for text in texts)
    questions = " ".join(each.request.question for each in examples if isinstance(each.request, Query))
    assert OLD in questions or NEW in questions


def test_what_is_written_is_what_was_trained(teacher: Teacher, tmp_path: Path):
    model = new_model(teacher.config, 0)
    added = add_adapter(model, (1, 4), seed=3)
    rows = torch.randn(5, teacher.config.text.dim)
    for own in added.values():
        assert torch.equal(own(rows), own.base(rows)), "it adds nothing at first"
        torch.nn.init.normal_(own.b)
    write_peft(tmp_path / "some", added, "some model")
    files = AdapterSource(tmp_path, (), 10**6).read("some")
    weights = read_adapter(files, teacher.config.text, 8, torch.float32)
    assert {f"text.{name}" for name in weights.factors} == set(added)
    for name, factors in weights.factors.items():
        own = added[f"text.{name}"]
        with torch.no_grad():
            own.a.copy_(own.a.bfloat16())
            own.b.copy_(own.b.bfloat16())
            torch.testing.assert_close(own.base(rows) + rows @ factors.a.T @ factors.b, own(rows))


def test_a_recipe_makes_the_same_bytes_each_time(tmp_path: Path):
    recipe = AdapterRecipe(num_steps=1, scenes_with=1, scenes_without=0, num_tests=1)
    for folder in ("first", "second"):
        train_adapter(tmp_path / folder, recipe)
    first, second = (
        [file.read_bytes() for file in sorted((tmp_path / folder / NEW).iterdir())]
        for folder in ("first", "second")
    )
    assert first == second
