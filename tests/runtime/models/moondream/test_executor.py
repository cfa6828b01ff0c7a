import itertools
from functools import cache

import pytest
import torch
from PIL import Image

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.executor import new_step_runner
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.output.output_parser import Token, TokenRule
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.page_manager import PageManager, StepId
from kestrel_runtime.scheduling.scheduler import Scheduler
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.models.moondream.tiny import random_model, tiny_config
from tests.runtime.noise import noise
from tests.runtime.sequences import new_sequence

CPU = torch.device("cpu")
MODELS = {generation: random_model(tiny_config(generation)) for generation in (2, 3)}
GENERATIONS = pytest.mark.parametrize("generation", MODELS)
NUM_IMAGE_TOKENS = 16
TEXT = [Token(id) for id in (0, 1, 236, 409, 2, 70, 87, 293, 3)]
REFERENCES = [Token(0), Token(1), Token(5, (0.25,)), Token(5, (0.75,)), Token(6, (0.5, 0.25)), Token(70), Token(3)]


class Bench:
    """Scheduler, cache and runner of a tiny model, turned step by step without output parsers."""

    def __init__(self, model, *, num_pages=200, page_size=4, batch=8, prefill=1000, crops=100, **paths):
        config = model.config.text
        cache = KVCache(config, num_pages, page_size, CPU, torch.float32)
        self.scheduler = Scheduler(
            PageManager(num_pages, page_size),
            max_batch_size=batch,
            max_prefill_tokens=prefill,
            max_crops_per_step=crops,
        )
        self.model, self.runner = (
            model,
            new_step_runner(
                model, cache, ExecutionConfig.of(EngineConfig(**paths), "cpu"), StepBounds(batch, prefill, crops)
            ),
        )
        self.num_preemptions = 0
        self.step_ids = itertools.count(1)

    def add(self, tokens, image=None, num_image_tokens=NUM_IMAGE_TOKENS, **settings):
        crops = None if image is None else MoondreamCropping(self.model.config.vision).make_crops(image)
        sequence = new_sequence(
            tokens, num_image_tokens=0 if image is None else num_image_tokens, pixels=crops, **settings
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        waiting = self.scheduler.num_waiting
        plan = self.scheduler.schedule(now=0.0)
        self.num_preemptions += max(0, self.scheduler.num_waiting - waiting)
        for batch in plan:
            if not batch.is_empty:
                tokens = self.runner.run(batch)
                step = StepId(next(self.step_ids))
                self.scheduler.commit(step, batch)
                self.scheduler.complete(step, batch, tokens)

    def generate(self, count, *sequences):
        """Run until each has `count` tokens; returns them."""
        while running := [sequence for sequence in sequences if sequence.num_generated < count]:
            self.step()
            for sequence in running:
                if sequence.num_generated == count:
                    self.scheduler.remove(sequence)
                    self.runner.release(sequence)
        return [sequence.tokens[sequence.num_prompt_tokens :] for sequence in sequences]


def written_out(model, count, tokens, image):
    """Greedy generation without cache, pages or batches: every step from the start."""
    picture = None if image is None else (image.size, image.tobytes())
    return list(_written_out(model, count, tuple(tokens), picture))


@cache  # several tests ask for the same
@torch.inference_mode()
def _written_out(model, count, tokens, picture):
    tokens, pictured = list(tokens), torch.empty(0, model.config.text.dim)
    if picture is not None:
        crops = MoondreamCropping(model.config.vision).make_crops(Image.frombytes("RGB", *picture))
        features = model.vision.encode(torch.from_numpy(crops.pixels))
        pictured = model.vision.project(features, crops.rows, crops.columns)
    prefix_length = 1 + len(pictured) if picture is not None else 0
    for _ in range(count):
        embeddings = torch.cat((model.embed(tokens[:1]), pictured, model.embed(tokens[1:])))
        hidden = model.text(embeddings, torch.arange(len(embeddings)), DenseAttend(prefix_length))
        tokens.append(Token(model.text.logits(hidden[-1:]).argmax().item()))
    return tokens[-count:]


CASES = {
    "text": (TEXT, None),
    "image": (TEXT, noise(40, 40)),
    "crops": (TEXT, noise(300, 120)),
    "places": (REFERENCES, noise(40, 40)),
}


@GENERATIONS
@pytest.mark.parametrize("case", CASES)
def test_what_is_generated_is_what_the_model_says_from_the_start(generation, case):
    model = MODELS[generation]
    tokens, image = CASES[case]
    bench = Bench(model)
    (generated,) = bench.generate(6, bench.add(tokens, image))
    assert generated == written_out(model, 6, tokens, image)


@GENERATIONS
@pytest.mark.parametrize("case", CASES)
def test_fused_backends_say_what_the_plain_ones_say(generation, case):
    tokens, image = CASES[case]
    plain, fused = (
        Bench(MODELS[generation]),
        Bench(MODELS[generation], text_backend="fused", vision_backend="fused"),
    )
    (wanted,) = plain.generate(6, plain.add(tokens, image))
    (actual,) = fused.generate(6, fused.add(tokens, image))
    assert actual == wanted


@GENERATIONS
@pytest.mark.parametrize(
    "sizes", [{"prefill": 3}, {"prefill": 18}, {"crops": 2}, {"page_size": 1}, {"page_size": 7}]
)
def test_the_size_of_steps_and_pages_does_not_show(generation, sizes):
    model = MODELS[generation]
    bench = Bench(model, **sizes)
    early = bench.add(TEXT)
    bench.step()  # from here on a sequence decodes, so that the rest is encoded in bounded steps
    late = [bench.add(*case) for case in CASES.values()]
    generated = bench.generate(6, early, *late)
    assert generated == [written_out(model, 6, *case) for case in ((TEXT, None), *CASES.values())]


@GENERATIONS
def test_a_sequence_that_makes_room_and_comes_back_says_the_same(generation):
    model = MODELS[generation]
    bench = Bench(model, num_pages=24, page_size=2)
    sequences = [bench.add(TEXT), bench.add(TEXT[:4], noise(40, 40)), bench.add(REFERENCES)]
    generated = bench.generate(16, *sequences)
    assert bench.num_preemptions > 0
    wanted = [(TEXT, None), (TEXT[:4], noise(40, 40)), (REFERENCES, None)]
    assert generated == [written_out(model, 16, *case) for case in wanted]


def test_seeded_draws_do_not_depend_on_company_or_pressure():
    def generated(num_pages, others):
        bench = Bench(MODELS[3], num_pages=num_pages, page_size=2)
        company = [bench.add(TEXT, temperature=1.0, seed=place) for place in range(others)]
        sequence = bench.add(REFERENCES, noise(40, 40), temperature=1.0, top_p=0.9, seed=11)
        return bench.generate(20, sequence, *company)[0], bench.num_preemptions

    alone, _ = generated(200, 0)
    beside, no_preemptions = generated(200, 3)
    pressed, some_preemptions = generated(40, 3)
    assert alone == beside == pressed
    assert no_preemptions == 0 < some_preemptions


def test_generated_places_are_fed_back_by_their_value():
    model = MODELS[2]
    rule = TokenRule(allowed=(5,), is_spatial=True)
    bench = Bench(model)
    (generated,) = bench.generate(3, bench.add(TEXT, rule=rule))
    assert all(token.id == 5 and len(token.value) == 1 for token in generated)
    again = Bench(model)
    (rest,) = again.generate(1, again.add([*TEXT, *generated[:2]], rule=rule))
    assert [(token.id, token.value) for token in rest] == [(token.id, token.value) for token in generated[2:]]
    assert [token.score for token in rest] == pytest.approx([token.score for token in generated[2:]])


def test_a_step_samples_for_the_prompts_that_end_in_it_and_for_no_other():
    bench = Bench(MODELS[2], prefill=4)
    running = bench.add(TEXT[:2])
    bench.step()
    ending, begun = bench.add(TEXT[:1]), bench.add(TEXT)
    plan = bench.scheduler.schedule(now=0.0)
    assert [chunk.sequence for chunk in plan.prefill.prefill] == [ending, begun]
    assert plan.prefill.sampled == (ending,)
    assert plan.decode.sampled == (running,)
    assert len(bench.runner.run(plan.prefill)) == len(bench.runner.run(plan.decode)) == 1


def test_a_step_that_only_encodes_crops_draws_nothing():
    bench = Bench(MODELS[2], crops=2)
    running = bench.add(TEXT[:2])
    bench.step()
    bench.scheduler.remove(running)
    bench.add(TEXT[:2])
    bench.step()
    sequence = bench.add(TEXT, noise(300, 120))
    batch = bench.scheduler.schedule(now=0.0).prefill
    assert [item.sequence for item in batch.encode] == [sequence]
    assert batch.prefill == ()
    assert bench.runner.run(batch) == []


def test_an_image_is_kept_until_its_sequence_is_released():
    bench = Bench(MODELS[2])
    sequence = bench.add(TEXT, noise(40, 40))
    bench.step()
    assert bench.runner.image_embeddings(sequence).shape == (NUM_IMAGE_TOKENS, MODELS[2].config.text.dim)
    bench.scheduler.remove(sequence)
    with pytest.raises(KeyError):
        bench.runner.image_embeddings(sequence)
    bench.runner.release(sequence)  # a sequence without an image is released all the same


def test_two_images_in_a_step_are_told_apart():
    model = MODELS[2]
    bench = Bench(model)
    pictures = [noise(40, 40, seed) for seed in range(2)]
    sequences = [bench.add(TEXT, picture) for picture in pictures]
    bench.step()
    first, second = (bench.runner.image_embeddings(sequence) for sequence in sequences)
    assert not torch.allclose(first, second)
    for sequence, picture in zip(sequences, pictures, strict=True):
        assert sequence.tokens[-1:] == written_out(model, 1, TEXT, picture)
