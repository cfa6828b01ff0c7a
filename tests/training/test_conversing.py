import io
import itertools
import json
import random

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import log_softmax

from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.events import QueryOutput
from kestrel_runtime.api.requests import Chat, ChatMessage, Role, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.output.output_parser import Token
from tests.training.conftest import NANO
from training import dialogues, pairs, records
from training.batches import PAIR_ROW_TOKENS, SHARED, GroupMaker, Row, Rows
from training.conversing import ConversingTeacher
from training.dialogues import Turn
from training.examples import IMAGE, Example, Teacher
from training.export import trainable_state
from training.fonts import FACES
from training.model import new_model
from training.network import Network
from training.palette import ANCHORS, COLORS, HELD_OUT_VALUES, distance, nearest_name
from training.scenes import HELD_OUT, make_scene
from training.words import with_article

SEEDS = range(60)


@pytest.fixture(scope="module")
def conversing(teacher: Teacher) -> ConversingTeacher:
    return ConversingTeacher(teacher.tokenizer, teacher.config, polishing=True)


def _picture(size: tuple[int, int], color: str) -> Image.Image:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((20, 30, 140, 150), fill=color)
    return image


def _file(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


USER, ASSISTANT, SYSTEM = Role.USER, Role.ASSISTANT, Role.SYSTEM
CONVERSATIONS = {
    "both at once": ((SYSTEM, "Be brief.", 0), (USER, "Which of the two pictures has a red circle?", 2)),
    "one later": (
        (USER, "What color is the circle?", 1),
        (ASSISTANT, "red", 0),
        (USER, "Which of the two pictures has a red circle?", 1),
    ),
    "after a talk": ((USER, "Hello!", 0), (ASSISTANT, "Hi", 0), (USER, "What color is the circle?", 1)),
}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
async def test_training_computes_what_the_server_answers_about_two_pictures(teacher: Teacher, messages):
    # The second one is large enough for several crops.
    pictures = [_picture((200, 170), "red"), _picture((430, 300), "blue")]
    num_images = sum(count for *_, count in messages)
    files = iter([_file(picture) for picture in pictures[-num_images:]])
    said = tuple(ChatMessage(role, text, tuple(itertools.islice(files, count))) for role, text, count in messages)
    sampling = SamplingParams(temperature=0.0, logprobs=0, max_tokens=12)
    engine = LocalEngine.start(EngineConfig(model=BUILT_IN_MODEL, device="cpu", dtype="float32", max_batch_size=2))
    try:
        output = (await engine.submit(Chat(said, sampling=sampling)).result()).output
    finally:
        engine.close()
    assert isinstance(output, QueryOutput)
    assert output.logprobs
    answer = tuple(Token(entry.id) for entry in output.logprobs)

    row = Row(teacher, None)
    row.begin_pair(1, has_both=messages[-1][2] == 2)
    without_bytes = tuple(ChatMessage(role, text, (IMAGE,) * count) for role, text, count in messages)
    assert row.add(Example(Chat(without_bytes), answer, "pair"))
    # Row 0 is about the first picture and has the second one of row 1.
    cropping = MoondreamCropping(teacher.config.vision)
    crops = [cropping.make_crops(picture) for picture in pictures]
    pixels = torch.cat([torch.from_numpy(crop.pixels) for crop in crops])
    rows = Rows(*(torch.from_numpy(row.arrays[name])[None].repeat_interleave(2, 0) for name in Rows.__slots__))
    rows.partner[1] = -1
    model = new_model(teacher.config, 0)
    model.load_state_dict(trainable_state(load_file(NANO / "model.safetensors")))
    with torch.no_grad():
        prediction = Network(model)(pixels, [(crop.rows, crop.columns) for crop in crops], rows)
    learnt = (rows.target[0] >= 0).nonzero()[:-1, 0]
    logprobs: Tensor = log_softmax(prediction.logits[0, learnt], dim=-1)
    found = logprobs.gather(1, torch.tensor([[token.id] for token in answer]))[:, 0]
    expected = torch.tensor([entry.logprob for entry in output.logprobs])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_every_answer_of_a_conversation_is_learnt_with_its_end(conversing: ConversingTeacher):
    turns = (
        Turn("What color is it?", "red", 1),
        Turn("And now?", "blue", is_true=False),
        Turn("And here?", "4", 1),
    )
    row = Row(conversing, None)
    row.begin_pair(1, has_both=False)
    assert row.add(conversing.conversation(turns, "later picture"))
    encode, end = conversing.tokenizer.encode, conversing.config.tokenizer.eos_id
    targets = row.arrays["target"][row.arrays["target"] >= 0].tolist()
    assert targets == [*encode("red"), end, *encode("4"), end]
    (patches,) = (row.arrays["patch"] >= 0).nonzero()
    assert row.arrays["patch"][patches].tolist() == list(range(conversing.config.vision.num_image_tokens))
    # A second one has no place in this row.
    assert not row.add(conversing.conversation(turns, "later picture"))


def test_a_row_of_a_pair_has_one_second_picture_which_its_questions_see(conversing: ConversingTeacher):
    rows = GroupMaker(conversing, 0, 6, 2)(0).visits
    num_patches = conversing.config.vision.num_image_tokens
    for part in rows:
        assert part.ids.shape == (6, PAIR_ROW_TOKENS)
        assert set((part.patch >= 0).sum(dim=1).tolist()) <= {0, num_patches}
        has_both = (part.example == SHARED).any(dim=1)
        assert has_both.any()
        assert torch.equal(part.sees_second.any(dim=1), has_both)
    assert all(part.partner.abs().min() > 0 for part in rows)


def _scenes(seed: int) -> tuple[pairs.Scene, pairs.Scene]:
    return make_scene(2 * seed), make_scene(2 * seed + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_which_of_two_pictures_names_the_one_that_has_it(seed: int):
    scenes = _scenes(seed)
    exchange = pairs.which(scenes, random.Random(seed))
    if exchange is None:
        return
    names = [{thing.name for thing in scene.shapes} for scene in scenes]
    colored = [{f"{thing.color} {thing.name}" for thing in scene.shapes} for scene in scenes]
    for mentioned in (names, colored):
        for phrase in mentioned[0] ^ mentioned[1]:
            if f"has {with_article(phrase)}?" in exchange.question:
                assert (
                    exchange.answer.removeprefix("the ")
                    in (("first", "1"), ("second", "2"))[phrase in mentioned[1]]
                )


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_in_json_are_valid_under_their_schema(seed: int):
    rng = random.Random(seed)
    for _ in range(20):
        found = records.record(make_scene(seed), rng)
        if found is None:
            continue
        value = json.loads(found.answer)
        assert found.answer == json.dumps(value, ensure_ascii=False)
        assert records.is_true(found.answer, found.answer)
        properties = found.schema.get("properties")
        if properties is not None:
            assert list(properties) == list(value)
            types = {"string": str, "integer": int, "boolean": bool, "array": list}
            assert all(type(value[key]) is types[part["type"]] for key, part in properties.items())
            assert all(value[key] in part["enum"] for key, part in properties.items() if "enum" in part)


def test_json_is_true_by_its_values_and_not_by_the_order_of_its_lists():
    assert records.is_true('{"a": ["x", "Y"], "b": 1}', '{"b": 1, "a": ["y", "x"]}')
    assert not records.is_true('{"a": 1}', '{"a": true}')
    assert not records.is_true('{"a": 1', '{"a": 1}')
    assert not records.is_true('{"a": ["x", "x"]}', '{"a": ["x"]}')


def test_what_a_constraint_gives_is_not_learnt(conversing: ConversingTeacher):
    hidden = records.Record("What color is it?", "", '{"color": "red", "count": 2}', {}, True)
    example = conversing.record_example(hidden, random.Random(0))
    decode = conversing.tokenizer.decode
    ids = [token.id for token in example.answer]
    assert decode(ids[: example.num_given]) == '{"color": "'
    assert decode(ids[example.num_given :]) == 'red", "count": 2}'
    visible = records.Record("What color is it?", "", '{"color": "red"}', {}, False)
    assert conversing.record_example(visible, random.Random(0)).num_given == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_conversation_has_its_pictures_and_ends_with_a_question(seed: int, conversing: ConversingTeacher):
    scenes, rng = _scenes(seed), random.Random(seed)
    for turns, num_images in (
        (dialogues.dialogue(scenes[0], rng), 1),
        (dialogues.later_picture(*scenes, rng), 2),
        (dialogues.both_at_once(*scenes, rng), 2),
        (dialogues.picture_after_talk(scenes[1], rng), 1),
        (dialogues.without_picture(rng), 0),
    ):
        if turns:
            request = conversing.conversation(turns, "dialogue", "Be brief.").request
            assert isinstance(request, Chat)
            assert len(request.images) == num_images
            assert request.messages[-1].role is Role.USER


def test_held_out_scenes_have_faces_values_and_layouts_of_their_own():
    scenes = [make_scene(seed, HELD_OUT) for seed in range(120)]
    assert all(text.face >= len(FACES) for scene in scenes for text in scene.texts)
    assert len({text.face for scene in scenes for text in scene.texts}) > 6
    for name, values in HELD_OUT_VALUES.items():
        for value in values:
            assert nearest_name(value)[0] == name
            # Values of training lie within 18 of a line between two anchors.
            shares = [step / 40 for step in range(41)]
            between = [
                tuple(a + (b - a) * share for a, b in zip(*ends, strict=True))
                for ends in itertools.product(ANCHORS[name], repeat=2)
                for share in shares
            ]
            assert min(distance(value, (r, g, b)) for r, g, b in between) > 18
    assert set(HELD_OUT_VALUES) == set(COLORS)
    aligned = [scene for scene in scenes if len(scene.shapes) > 2]
    lines = [
        scene
        for scene in aligned
        if len({round(thing.center[0], 6) for thing in scene.shapes}) < len(scene.shapes)
        or len({round(thing.center[1], 6) for thing in scene.shapes}) < len(scene.shapes)
    ]
    assert len(lines) > len(aligned) / 3
