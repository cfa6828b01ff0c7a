import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.kv_cache import KVCache
from kestrel_runtime.lane import Lane
from kestrel_runtime.models.moondream.fused_prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused_weights import fused_blocks
from kestrel_runtime.prefill_plan import PrefillPlan
from kestrel_runtime.prompt_graphs import PromptGraphs, PromptInputs, PromptSize
from kestrel_runtime.recording import Recorder
from kestrel_runtime.sequence import Chunk
from tests.runtime.models.moondream.tiny import random_model, tiny_config
from tests.runtime.sequences import new_sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_IMAGE_TOKENS, PAGE_SIZE, NUM_PAGES = 16, 4, 80


class Prompts:
    """A tiny decoder, its cache, and prompts with an image."""

    def __init__(self, generation):
        self.text = random_model(tiny_config(generation)).text.to(DEVICE)
        kernels = Kernels.select(DEVICE.type, {})
        self.fused = FusedPrefill(self.text, fused_blocks(self.text, "model"), kernels)
        self.cache = KVCache(self.text.config, NUM_PAGES, PAGE_SIZE, DEVICE, torch.float32)
        self.free_pages = list(range(NUM_PAGES))

    def pack(self, *lengths):
        """Embeddings, plan and last rows of prompts of these lengths."""
        chunks = []
        for length in lengths:
            sequence = new_sequence(length - NUM_IMAGE_TOKENS, num_image_tokens=NUM_IMAGE_TOKENS)
            sequence.pages = [self.free_pages.pop() for _ in range(-(-length // PAGE_SIZE))]
            chunks.append(Chunk(sequence, 0, length))
        plan = PrefillPlan.of(chunks, PAGE_SIZE, DEVICE)
        embeddings = torch.randn(sum(lengths), self.text.config.dim, device=DEVICE)
        return embeddings, plan, plan.query_starts[1:].long() - 1

    def prefill(self, embeddings, plan, rows):
        return self.fused.forward(embeddings, plan, self.cache, rows)

    def inputs(self, max_tokens=128):
        config = self.text.config
        return PromptInputs(config.dim, NUM_PAGES, torch.float32, DEVICE, max_tokens=max_tokens, max_chunks=3)

    def pages(self):
        return self.cache.key_pages.clone(), self.cache.value_pages.clone()

    def empty(self):
        self.cache.key_pages.zero_()
        self.cache.value_pages.zero_()


def assert_same(prompts, padded, packed):
    """The same hidden states and the same pages, padded or not."""
    prompts.empty()
    wanted, pages = prompts.prefill(*packed), prompts.pages()
    prompts.empty()
    torch.testing.assert_close(padded(*packed)[: len(wanted)], wanted)
    for got, page in zip(prompts.pages(), pages, strict=True):
        torch.testing.assert_close(got, page)


@pytest.mark.parametrize("generation", [2, 3])
def test_nobodys_tokens_and_chunks_change_nothing(generation):
    prompts = Prompts(generation)
    inputs = prompts.inputs()

    def padded(*packed):
        inputs.fill(*packed)
        return prompts.prefill(*inputs.padded(PromptSize(128, 4, 64)))

    # The fullest first: what it leaves behind must not count.
    for lengths in ((40, 20, 30), (23, 31), (25,)):
        assert_same(prompts, padded, prompts.pack(*lengths))


def test_rows_that_are_not_asked_for_change_nothing():
    prompts = Prompts(2)
    inputs = prompts.inputs()
    embeddings, plan, rows = prompts.pack(40, 20, 30)
    wanted = prompts.prefill(embeddings, plan, rows)
    inputs.fill(embeddings, plan, rows[1:2])
    got = prompts.prefill(*inputs.padded(PromptSize.of(plan)))
    torch.testing.assert_close(got[:1], wanted[1:2])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("generation", [2, 3])
def test_replayed_prompts_are_those_that_were_run(generation):
    prompts = Prompts(generation)
    graphs = PromptGraphs(prompts.prefill, prompts.inputs(), Recorder(Lane(torch.device("cuda"))))
    for lengths in ((40,), (23,), (20, 30), (31, 18), (25, 24), (19, 28), (17, 70)):
        assert_same(prompts, graphs, prompts.pack(*lengths))
        prompts.free_pages = list(range(NUM_PAGES))


def test_what_there_is_no_room_for_does_not_fit():
    inputs = Prompts(2).inputs(max_tokens=100)  # a multiple of 128 is kept
    assert inputs.fits(PromptSize(128, 4, 64))
    assert not inputs.fits(PromptSize(192, 1, 192))
    assert not inputs.fits(PromptSize(128, 8, 64))


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ((20,), (64, 1, 64)),
        ((64,), (64, 1, 64)),
        ((65,), (128, 1, 128)),
        ((100, 20), (128, 2, 128)),
        ((30, 20, 17), (128, 4, 64)),
    ],
)
def test_sizes_are_rounded_up_to_few(lengths, size):
    _, plan, _ = Prompts(2).pack(*lengths)
    assert PromptSize.of(plan) == size
