import dataclasses

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.kv_cache import KVCache
from kestrel_runtime.models.moondream.fused_prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused_weights import fused_blocks
from kestrel_runtime.prefill_plan import PrefillPlan
from kestrel_runtime.prompt_graphs import PromptGraphs, PromptInputs, is_recorded, padded_length
from kestrel_runtime.sequence import Chunk
from tests.runtime.models.moondream.tiny import random_model, tiny_config
from tests.runtime.sequences import new_sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_IMAGE_TOKENS, PAGE_SIZE, NUM_PAGES = 16, 4, 40


class Prompts:
    """A tiny decoder, its cache, and prompts with an image."""

    def __init__(self, generation):
        self.text = random_model(tiny_config(generation)).text.to(DEVICE)
        kernels = Kernels.select(DEVICE.type, {})
        self.fused = FusedPrefill(self.text, fused_blocks(self.text, "model"), kernels)
        self.cache = KVCache(self.text.config, NUM_PAGES, PAGE_SIZE, DEVICE, torch.float32)
        self.free_pages = list(range(NUM_PAGES))

    def prompt(self, length):
        """Embeddings, plan and last row."""
        sequence = new_sequence(length - NUM_IMAGE_TOKENS, num_image_tokens=NUM_IMAGE_TOKENS)
        sequence.pages = [self.free_pages.pop() for _ in range(-(-length // PAGE_SIZE))]
        plan = PrefillPlan.of([Chunk(sequence, 0, length)], PAGE_SIZE, DEVICE)
        embeddings = torch.randn(length, self.text.config.dim, device=DEVICE)
        return embeddings, plan, plan.query_starts[1:].long() - 1

    def prefill(self, embeddings, plan, rows):
        return self.fused.forward(embeddings, plan, self.cache, rows)

    def inputs(self):
        return PromptInputs(self.text.config.dim, NUM_PAGES, torch.float32, DEVICE)

    def pages(self):
        return self.cache.key_pages.clone(), self.cache.value_pages.clone()

    def empty(self):
        self.cache.key_pages.zero_()
        self.cache.value_pages.zero_()


def assert_same(prompts, padded, prompt):
    """The same hidden state and the same pages, padded or not."""
    prompts.empty()
    wanted, pages = prompts.prefill(*prompt), prompts.pages()
    prompts.empty()
    torch.testing.assert_close(padded(*prompt), wanted)
    for got, page in zip(prompts.pages(), pages, strict=True):
        torch.testing.assert_close(got, page)


@pytest.mark.parametrize("generation", [2, 3])
def test_nobodys_tokens_change_nothing(generation):
    prompts = Prompts(generation)
    inputs = prompts.inputs()

    def padded(*prompt):
        inputs.fill(*prompt)
        return prompts.prefill(*inputs.padded(64))

    for length in (40, 23, 31):  # the longest first: what it leaves behind must not count
        assert_same(prompts, padded, prompts.prompt(length))


def test_inputs_without_a_chunk_write_no_page():
    prompts = Prompts(2)
    prompts.empty()
    inputs = prompts.inputs()
    inputs.fill(*prompts.prompt(20))
    inputs.clear()
    prompts.prefill(*inputs.padded(64))
    assert not any(pages.any() for pages in prompts.pages())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("generation", [2, 3])
def test_replayed_prompts_are_those_that_were_run(generation):
    prompts = Prompts(generation)
    graphs = PromptGraphs(prompts.prefill, prompts.inputs())
    for length in (40, 23, 31):
        assert_same(prompts, graphs, prompts.prompt(length))


def test_one_short_chunk_that_is_asked_for_one_row_is_recorded():
    embeddings, plan, rows = Prompts(2).prompt(20)
    assert is_recorded(embeddings, plan, rows)
    assert not is_recorded(embeddings, plan, rows[:0])
    assert not is_recorded(embeddings.repeat(52, 1), plan, rows)
    two = dataclasses.replace(plan, lengths=plan.lengths.repeat(2))
    assert not is_recorded(embeddings, two, rows)


@pytest.mark.parametrize(("num_tokens", "padded"), [(1, 64), (64, 64), (65, 128), (746, 768), (1024, 1024)])
def test_lengths_are_rounded_up_to_few(num_tokens, padded):
    assert padded_length(num_tokens) == padded
