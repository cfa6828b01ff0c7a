"""A decoder with FlashInfer's attention, by a double of it: plans follow the steps, and keys are in their pages."""

import importlib.util

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.fused.prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused.weights import fused_blocks
from tests.kernels.test_flashinfer import library
from tests.runtime.models.moondream.fused.test_decode import Bench
from tests.runtime.models.moondream.fused.test_prefill import VARIANTS, Prompts, off_by

HAS_INTERPRETER = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
needs_interpreter = pytest.mark.skipif(not HAS_INTERPRETER, reason="needs the interpreter")

__all__ = ["library"]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prompts_and_conversations_give_what_the_plain_model_gives(library, variant):
    prompts = Prompts((23, 5, 30), variant, conversations=(0,), pictured=(2,))
    kernels = Kernels.select("cpu", {"prefill_attention": "flashinfer"})
    prompts.fused = FusedPrefill(prompts.text, fused_blocks(prompts.text, "model"), kernels)
    wanted = torch.stack([prompts.plain(row)[0][-1] for row in range(3)])
    assert off_by(prompts.run((0, 0, 23), (1, 0, 5), (2, 0, 30), last=[0, 1, 2]), wanted) < 1e-5
    prompts.cache.renew()
    prompts.run((0, 0, 9), (2, 0, 20), last=[])
    assert off_by(prompts.run((2, 20, 30), (0, 9, 23), last=[1, 0]), wanted[[0, 2]]) < 1e-5


@needs_interpreter
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_decode_steps_give_what_the_plain_model_gives(library, variant):
    bench = Bench(variant)
    kernels = Kernels.select("cpu", {"rotary_decode_attention": "flashinfer"})
    bench.decoder = FusedDecoder(bench.text, fused_blocks(bench.text, "model"), kernels)
    embeddings = bench.embeddings(7)
    assert off_by(bench.decoded(embeddings), bench.plain(embeddings)) < 1e-5
