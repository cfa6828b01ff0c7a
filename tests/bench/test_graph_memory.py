"""What captured graphs take of memory: the parts that need no GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from bench import graph_memory
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.execution_config import FastPaths
from kestrel_runtime.models.moondream.memory_needs import new_cache
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.scheduling.limits import StepBounds
from tests.golden import MD2_SMALL


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_without_a_gpu_it_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["graph_memory"])
    assert graph_memory.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@torch.inference_mode()
def test_the_largest_prefill_has_as_many_tokens_as_a_step_may_carry() -> None:
    config = EngineConfig(model=str(MD2_SMALL), device="cpu", text_path="fused")
    loaded = LoadedModel.load(config)
    paths, bounds = FastPaths.of(config, "cpu"), StepBounds(4, 256, 4)
    model_paths = ModelPaths.of(loaded.model, paths, max_batch_size=4)
    seen: list[int] = []
    prefill = model_paths.text.prefill

    def look(embeddings: Tensor, plan: PackedChunks, rows: Tensor, cache: KVCache) -> Tensor:
        seen.append(len(embeddings))
        return prefill(embeddings, plan, rows, cache)

    model_paths.text.prefill = look
    hidden = graph_memory._largest_prefill(loaded, model_paths, new_cache(loaded.model, config, 8), bounds)()
    assert seen == [256]
    assert hidden.isfinite().all()
