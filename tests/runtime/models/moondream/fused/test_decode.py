import importlib.util
from typing import Literal

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.fused.weights import fused_blocks, fused_head
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.models.moondream.tiny import random_model, tiny_config

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn
PAGE_SIZE = 4
VARIANTS = [(2, 2, 2), (2, 4, 2), (3, 2, 2)]  # generation, query heads, key/value heads
# These tensors lie on the CPU, where kernels in Triton run only in its interpreter.
HAS_INTERPRETER = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
EVERY_KERNEL = ["reference", *(["triton"] if HAS_INTERPRETER else [])]


class Bench:
    """A tiny decoder both ways: the plain model, and fused with pages of its own."""

    def __init__(
        self,
        variant=VARIANTS[0],
        precision: Literal["model", "float8"] = "model",
        cache_dtype=torch.float32,
        max_batch=4,
        kernels="reference",
        most_pages=4,
    ):
        generation, n_heads, n_kv_heads = variant
        self.text = random_model(tiny_config(generation, n_heads=n_heads, n_kv_heads=n_kv_heads)).text
        operations = ("decode_expand", "decode_contract", "rotary_decode_attention")
        blocks = fused_blocks(self.text, precision)
        self.decoder, self.definition = (
            FusedDecoder(self.text, blocks, Kernels.select("cpu", dict.fromkeys(operations, implementation)))
            for implementation in (kernels, "reference")
        )
        self.cache = KVCache(self.text.config, 1 + max_batch * most_pages, PAGE_SIZE, CPU, cache_dtype)
        pages = torch.randperm(max_batch * most_pages, generator=torch.Generator().manual_seed(1)) + 1
        self.page_table = pages.view(max_batch, most_pages).int()
        self.workspace = self.decoder.workspace(max_batch)

    def step(self, embeddings, positions, rows, decoder=None):
        """One step of the sequences that own the given rows of the page table."""
        positions = torch.tensor(positions)
        return (
            (decoder or self.decoder)
            .forward(embeddings, positions, self.page_table[rows], self.cache, self.workspace)
            .clone()
        )

    def decoded(self, embeddings):
        """Every position of one sequence, each in a step of its own: [length, dim]."""
        return torch.cat([self.step(row[None], [place], [2]) for place, row in enumerate(embeddings)])

    def plain(self, embeddings):
        return self.text(embeddings, torch.arange(len(embeddings)), DenseAttend())

    def embeddings(self, length, seed=0):
        return torch.randn(length, self.text.config.dim, generator=torch.Generator().manual_seed(seed))


def off_by(result, wanted):
    return ((result - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("precision", "cache_dtype", "tolerance"),
    [("model", torch.float32, 1e-5), ("float8", torch.float32, 0.1), ("model", FLOAT8, 0.1)],
)
def test_steps_give_what_the_plain_model_gives(variant, precision, cache_dtype, tolerance):
    bench = Bench(variant, precision, cache_dtype)
    embeddings = bench.embeddings(11)
    assert off_by(bench.decoded(embeddings), bench.plain(embeddings)) < tolerance


@pytest.mark.parametrize("kernels", EVERY_KERNEL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_of_several_lengths_step_together(variant, kernels):
    bench = Bench(variant, kernels=kernels)
    sequences = [bench.embeddings(length, seed=length) for length in (3, 1, 9)]
    for row, sequence in enumerate(sequences):
        for place, embedding in enumerate(sequence[:-1]):
            bench.step(embedding[None], [place], [row], bench.definition)
    last = torch.stack([sequence[-1] for sequence in sequences])
    hidden = bench.step(last, [len(sequence) - 1 for sequence in sequences], [0, 1, 2])
    wanted = torch.stack([bench.plain(sequence)[-1] for sequence in sequences])
    torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_without_a_token_change_nothing(variant):
    bench, alone = Bench(variant), Bench(variant)
    embeddings = bench.embeddings(6)
    wanted = alone.decoded(embeddings)
    for place, embedding in enumerate(embeddings):
        rows = torch.stack((torch.full_like(embedding, 3.0), embedding, embedding))
        hidden = bench.step(rows, [-1, place, -1], [0, 2, 0])
        torch.testing.assert_close(hidden[1], wanted[place])
    torch.testing.assert_close(bench.cache.key_pages, alone.cache.key_pages)
    torch.testing.assert_close(bench.cache.value_pages, alone.cache.value_pages)


@pytest.mark.parametrize("kernels", EVERY_KERNEL)
def test_counters_that_a_failed_step_left_do_not_matter(kernels):
    bench = Bench(kernels=kernels, most_pages=30)  # a context long enough to be attended to in parts
    embeddings = bench.embeddings(2)
    wanted = bench.step(embeddings, [100, 110], [0, 2])
    bench.workspace.counters.fill_(1)
    bench.workspace.partials.fill_(torch.nan)
    torch.testing.assert_close(bench.step(embeddings, [100, 110], [0, 2]), wanted, rtol=0, atol=0)


def test_float8_weights_work_on_float16():
    workspace = Bench(precision="float8").workspace
    assert workspace.qkv.dtype == workspace.activations.dtype == torch.float16
    assert workspace.hidden.dtype == torch.float32


@pytest.mark.parametrize(("precision", "tolerance"), [("model", 1e-5), ("float8", 0.05)])
def test_the_head_gives_the_logits_of_the_plain_model(precision, tolerance):
    bench = Bench()
    hidden = bench.embeddings(3)
    logits = torch.full((3, bench.text.config.vocab_size), torch.nan)
    bench.decoder.logits(hidden, fused_head(bench.text, precision), logits)
    assert off_by(logits, bench.text.logits(hidden)) < tolerance
