"""The step runner on the tests' own family: whatever the steps, each sequence gets what it would get alone."""

import itertools

import pytest
import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.output.output_parser import Token, TokenRule
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.page_manager import PageManager, StepId
from kestrel_runtime.scheduling.scheduler import Scheduler
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.models.second_family.small_pictures import (
    NUM_IMAGE_TOKENS,
    PLACE_ID,
    PicturesCropping,
    SmallPicturesFamily,
    random_pictures,
)
from tests.runtime.noise import noise
from tests.runtime.sequences import new_sequence

MODEL = random_pictures(640)
TEXT = [Token(id) for id in (0, 1, 236, 409, 2, 70, 87, 293, 3)]
PLACES = [Token(0), Token(1), Token(PLACE_ID, (0.25,)), Token(PLACE_ID, (0.75,)), Token(70)]
CASES = {
    "text": (TEXT, None),
    "image": (TEXT, noise(40, 40)),
    "crops": (TEXT, noise(300, 120)),
    "places": (PLACES, None),
}


class Bench:
    """Scheduler and runner, turned step by step without output parsers."""

    def __init__(self, *, num_pages=500, page_size=16, batch=8, prefill=1000, max_crops=100):
        bounds = StepBounds(batch, prefill, max_crops)
        config = EngineConfig(model="", page_size=page_size)
        prepared = SmallPicturesFamily().prepare(MODEL, config, bounds, owns_model=False)
        self.runner = prepared.new_step_runner(num_pages, 0)
        self.scheduler = Scheduler(
            PageManager(num_pages, page_size),
            max_batch_size=batch,
            max_prefill_tokens=prefill,
            max_crops_per_step=max_crops,
        )
        self.num_preemptions = 0
        self.step_ids = itertools.count(1)

    def add(self, tokens, image=None, **settings):
        crops = None if image is None else PicturesCropping().make_crops(image)
        num_image_tokens = 0 if image is None else NUM_IMAGE_TOKENS
        sequence = new_sequence(tokens, num_image_tokens=num_image_tokens, pixels=crops, **settings)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        waiting = self.scheduler.num_waiting
        plan = self.scheduler.schedule(now=0.0)
        self.num_preemptions += max(0, self.scheduler.num_waiting - waiting)
        for batch in plan:
            if not batch.is_empty:
                tokens, step = self.runner.run(batch), StepId(next(self.step_ids))
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


@torch.inference_mode()
def written_out(count, tokens, image):
    """Greedy generation without cache, pages or batches: every step from the start."""
    tokens, pictured = list(tokens), torch.empty(0, MODEL.config.dim)
    if image is not None:
        pictured = MODEL.encode(torch.from_numpy(PicturesCropping().make_crops(image).pixels)).mean(0)
    prefix_length = 1 + len(pictured) if image is not None else 0
    for _ in range(count):
        ids = torch.tensor([token.id for token in tokens])
        num_values = torch.tensor([len(token.value) for token in tokens])
        values = torch.tensor([(*token.value, 0.0)[:1] for token in tokens])
        text = MODEL.embed(ids, num_values, values)
        embeddings = torch.cat((text[:1], pictured, text[1:]))
        hidden = MODEL.attended(embeddings, torch.arange(len(embeddings)), DenseAttend(prefix_length))
        tokens.append(Token(int(MODEL.logits(hidden[-1:]).argmax())))
    return tokens[-count:]


@pytest.mark.parametrize("case", CASES)
def test_what_is_generated_is_what_the_model_says_from_the_start(case):
    bench = Bench()
    assert bench.generate(4, bench.add(*CASES[case])) == [written_out(4, *CASES[case])]


@pytest.mark.parametrize("sizes", [{"prefill": 18}, {"max_crops": 2}, {"page_size": 7}])
def test_the_size_of_steps_and_pages_does_not_show(sizes):
    bench = Bench(**sizes)
    early = bench.add(TEXT)
    bench.step()  # one decodes from here on, so that the rest comes in bounded steps
    late = [bench.add(*case) for case in CASES.values()]
    generated = bench.generate(4, early, *late)
    assert generated == [written_out(4, *case) for case in ((TEXT, None), *CASES.values())]


def test_a_preempted_sequence_goes_on_where_it_was():
    bench = Bench(num_pages=20, page_size=2)
    cases = [(TEXT, None), (PLACES, None), (TEXT[:4], None)]
    generated = bench.generate(12, *(bench.add(*case) for case in cases))
    assert bench.num_preemptions > 0
    assert generated == [written_out(12, *case) for case in cases]


def test_sampled_values_are_fed_back():
    rule = TokenRule(allowed=(PLACE_ID,), is_spatial=True)
    bench = Bench()
    (generated,) = bench.generate(3, bench.add(TEXT, rule=rule))
    assert all(token.id == PLACE_ID and len(token.value) == 1 for token in generated)
    (rest,) = bench.generate(1, bench.add([*TEXT, *generated[:2]], rule=rule))
    assert rest == generated[2:]


def test_two_images_in_a_step_are_told_apart():
    bench, pictures = Bench(prefill=2000), [noise(40, 40, seed) for seed in range(2)]
    sequences = [bench.add(TEXT, picture) for picture in pictures]
    bench.step()
    first, second = (bench.runner.image_embeddings(sequence) for sequence in sequences)
    assert not torch.allclose(first, second)
    assert [list(sequence.tokens[-1:]) for sequence in sequences] == [
        written_out(1, TEXT, picture) for picture in pictures
    ]
