import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.execution.captured_graphs import GraphBudget
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.prefill_graphs import PromptGraphs, PromptInputs, PromptSize
from kestrel_runtime.execution.step_inputs import PrefillPlan
from kestrel_runtime.models.moondream.fused_prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused_weights import fused_blocks
from kestrel_runtime.scheduling.batch import Chunk
from tests.runtime.fake_cuda import new_recorder, settle
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


def new_graphs(prompts, recorder):
    return PromptGraphs(prompts.prefill, prompts.inputs(), recorder, GraphBudget(max_bytes=2**30))


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("generation", [2, 3])
def test_replayed_prompts_are_those_that_were_run(generation, is_warm):
    prompts, recorder = Prompts(generation), new_recorder(DEVICE)
    graphs = new_graphs(prompts, recorder)
    if is_warm:
        usual = graphs.usual(1 + NUM_IMAGE_TOKENS, prompts.text.config.max_context)
        graphs.captured.capture_all(usual, until=float("inf"))
    settle(DEVICE)
    with recorder.entered():
        for lengths in ((40,), (23,), (20, 30), (31, 18), (25, 24), (19, 28), (17, 70)):
            assert_same(prompts, graphs, prompts.pack(*lengths))
            prompts.free_pages = list(range(NUM_PAGES))
    assert len(graphs.captured) > (2 if is_warm else 1)


def test_warming_up_stores_nothing_and_leaves_nothing_behind():
    prompts, recorder = Prompts(2), new_recorder(DEVICE)
    graphs = new_graphs(prompts, recorder)
    prompts.empty()
    settle(DEVICE)
    graphs.captured.capture_all(graphs.usual(1 + NUM_IMAGE_TOKENS, 2048), until=float("inf"))
    settle(DEVICE)
    assert not any(pages.any() for pages in prompts.pages())


def test_usual_are_prompts_of_moderate_length_and_several_questions_about_images():
    sizes = PromptSize.usual(730, max_tokens=8192, max_chunks=64)
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < 50
    assert {PromptSize(tokens, 1, tokens) for tokens in range(64, 1025, 64)} <= set(sizes)
    for count in range(2, 11):
        for text in (8, 16, 24):
            assert PromptSize.above(count * (730 + text), count, 730 + text) in sizes
    assert all(size.num_tokens <= 8192 and size.num_chunks <= 64 for size in sizes)
    assert all(size.num_tokens <= size.num_chunks * size.max_chunk for size in sizes)


def test_a_context_shorter_than_a_usual_size_leaves_that_size_out():
    prompts = Prompts(2)
    graphs = new_graphs(prompts, new_recorder(DEVICE))
    usual = [key for key, _ in graphs.usual(1 + NUM_IMAGE_TOKENS, 100)]
    assert PromptSize(64, 1, 64) in usual
    assert PromptSize(128, 1, 128) not in usual
    assert PromptSize(128, 2, 64) in usual  # of two prompts, each within the context


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
