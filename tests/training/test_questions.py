import random

import pytest

from training import phrases
from training.captions import long_caption, normal_caption, short_caption
from training.facts import ask_fact
from training.palette import COLORS
from training.questions import KINDS, ask
from training.scenes import make_scene
from training.scoring import inventory
from training.shapes import SHAPES

SEEDS = range(80)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_question_is_found_in_some_scenes(kind: str):
    asked = [ask(make_scene(seed), kind, random.Random(seed)) for seed in SEEDS]
    found = [exchange for exchange in asked if exchange is not None]
    assert len(found) > 10
    assert all("{" not in exchange.question and exchange.answer for exchange in found)
    assert len({exchange.question for exchange in found}) > 2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_count_is_the_number_of_things_meant(seed: int):
    exchange = ask(make_scene(seed), "count", random.Random(seed))
    if exchange is not None:
        ((_, things),) = exchange.evidence
        assert exchange.answer == str(len(things))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_absent_is_absent(seed: int):
    scene = make_scene(seed)
    referent = phrases.absent(scene, random.Random(seed))
    assert referent.things == ()
    words = referent.singular.replace("grey", "gray").split()
    assert not any(
        f"{thing.color} {thing.name}".split() == words or [thing.name] == words for thing in scene.things
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_left_and_right_follow_from_the_boxes(seed: int):
    exchange = ask(make_scene(seed), "relation", random.Random(seed))
    if exchange is not None and exchange.answer in ("left", "right", "above", "below"):
        (_, (first,)), (_, (second,)) = exchange.evidence
        axis = 0 if exchange.answer in ("left", "right") else 1
        is_before = first.center[axis] < second.center[axis]
        assert is_before == (exchange.answer in ("left", "above"))


@pytest.mark.parametrize("seed", SEEDS)
def test_captions_name_all_shapes_and_no_other(seed: int):
    scene = make_scene(seed)
    truth: dict[str, int] = {}
    for thing in scene.shapes:
        truth[f"{thing.color} {thing.name}"] = truth.get(f"{thing.color} {thing.name}", 0) + 1
    for caption in (short_caption(scene), normal_caption(scene), long_caption(scene)):
        assert inventory(caption, COLORS, SHAPES) == truth
        assert all(thing.text in caption for thing in scene.texts)


def test_sums_are_right():
    rng = random.Random(0)
    for _ in range(2000):
        exchange = ask_fact(rng)
        words = exchange.question.removeprefix("What is ").removesuffix("?").split()
        if exchange.kind == "arithmetic" and len(words) == 3 and words[0].isdigit() and words[1] in "+-":
            first, sign, second = int(words[0]), words[1], int(words[2])
            assert exchange.answer == str(first + second if sign == "+" else first - second)
