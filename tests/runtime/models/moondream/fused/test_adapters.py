"""Steps and prompts with adapters give what the plain model gives with them, whoever else is in the batch."""

import importlib.util

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs, AdapterWeights, Factors, target_shapes
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.fused.prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused.weights import fused_blocks
from kestrel_runtime.scheduling.batch import Chunk
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.execution.packed_chunks import packed_chunks
from tests.runtime.models.moondream.fused.test_prefill import Prompts
from tests.runtime.models.moondream.tiny import random_model, tiny_config

CPU = torch.device("cpu")
HAS_INTERPRETER = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
OPERATIONS = (
    "add_layer_norm",
    "rows_by_slot",
    "add_up_terms",
    "add_down_terms",
    "decode_expand",
    "decode_contract",
)
# Of the generations of the model, the second of which has experts: what computes it.
CASES = [(2, "reference"), (3, "reference"), *([(2, "triton")] if HAS_INTERPRETER else [])]
SLOTS = (2, 0, 1, 3)


def kernels_of(implementation: str) -> Kernels:
    return Kernels.select("cpu", dict.fromkeys(OPERATIONS, implementation))


def filled_slabs(config: TextConfig) -> AdapterSlabs:
    """Three adapters: of all targets, of the attention alone, and one whose projection reads the block's input."""
    slabs = AdapterSlabs(config, 3, 6, CPU, torch.float32)
    chance = torch.Generator().manual_seed(1)
    for slot, rank in ((1, 6), (2, 1), (3, 4)):
        factors: dict[str, Factors] = {}
        for target, shape in target_shapes(config, rank).items():
            if slot != 2 or "attn" in target:
                stack = () if shape.num_experts is None else (shape.num_experts,)
                sizes = ((*stack, shape.max_rank, width) for width in (shape.in_dim, shape.out_dim))
                factors[target] = Factors(*(0.3 * torch.randn(size, generator=chance) for size in sizes))
        slabs.write(slot, AdapterWeights(factors, reads_block_input=slot == 3))
    return slabs


@pytest.mark.parametrize(("generation", "implementation"), CASES)
def test_a_step_of_several_adapters_is_each_of_the_plain_model(generation: int, implementation: str):
    text = random_model(tiny_config(generation)).text
    slabs, decoder = (
        filled_slabs(text.config),
        FusedDecoder(text, fused_blocks(text, "model"), kernels_of(implementation)),
    )
    embeddings = torch.randn(4, text.config.dim, generator=torch.Generator().manual_seed(2))
    cache, positions, pages = (
        KVCache(text.config, 5, 4, CPU, torch.float32),
        torch.zeros(4).long(),
        torch.arange(1, 5),
    )
    workspace = decoder.workspace(4)

    def step(slots: torch.Tensor) -> torch.Tensor:
        adapters = slabs.for_rows(slots)
        return decoder.forward(embeddings, positions, pages[:, None].int(), cache, workspace, adapters).clone()

    found, bare = step(torch.tensor(SLOTS)), step(torch.zeros(4, dtype=torch.int64))
    for row, slot in enumerate(SLOTS):
        own = slabs.for_rows(torch.tensor([slot]))
        expected = text(embeddings[row : row + 1], positions[:1], DenseAttend(), own)[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[row], bare[row]) == (slot == 0)


@pytest.mark.parametrize(("generation", "implementation"), CASES)
def test_prompts_of_several_adapters_are_each_of_the_plain_model(generation: int, implementation: str):
    prompts = Prompts((5, 7, 3, 4), (generation, 2, 2))
    slabs = filled_slabs(prompts.text.config)
    fused = FusedPrefill(prompts.text, fused_blocks(prompts.text, "model"), kernels_of(implementation))
    chunks = [
        Chunk(sequence, 0, len(rows)) for sequence, rows in zip(prompts.sequences, prompts.embeddings, strict=True)
    ]
    plan = packed_chunks(chunks, prompts.cache.page_size, CPU)
    lengths = torch.tensor([len(rows) for rows in prompts.embeddings])
    adapters = slabs.for_rows(torch.tensor(SLOTS).repeat_interleave(lengths))
    last = plan.query_starts[1:].long() - 1
    whole = fused.forward(torch.cat(prompts.embeddings), plan, prompts.cache, None, adapters)
    ends = fused.forward(torch.cat(prompts.embeddings), plan, prompts.cache, last, adapters)
    for row, (slot, rows) in enumerate(zip(SLOTS, prompts.embeddings, strict=True)):
        own = slabs.for_rows(torch.full((len(rows),), slot))
        expected = prompts.text(rows, torch.arange(len(rows)), DenseAttend(), own)
        found = whole[plan.query_starts[row] : plan.query_starts[row + 1]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ends[row], expected[-1], rtol=1e-4, atol=1e-4)
