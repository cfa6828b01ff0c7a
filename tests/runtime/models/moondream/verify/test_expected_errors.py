"""Simulated errors are as large as those of real paths: over a float8 cache, and where experts nearly tie."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.correctness.dimensions import shape_of, write_fixture
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify import expected_errors as module
from kestrel_runtime.models.moondream.verify.formats import Formats
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun
from kestrel_runtime.models.moondream.verify.prompt_tensors import DECODED_HIDDEN, HIDDEN, prompt_tensors
from kestrel_runtime.verify.preparing import preparing
from kestrel_runtime.verify.reference_fixture import ReferenceFixture
from tests.reference_fixtures import MD2_SMALL

CONFIG = EngineConfig(device="cpu", dtype="bfloat16", text_path="plain", kv_dtype="float8")


def test_a_decode_step_over_a_real_float8_cache_is_off_as_far_as_simulated_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "NUM_SIMULATIONS", 24)  # for a mean square that is certain enough
    # The cache's scale shifts the grid that numbers are rounded to: each gives another correct result.
    config = replace(CONFIG, model=str(MD2_SMALL))
    loaded = LoadedModel.load(config)
    request = Query("license terms", (MD2_SMALL / "image_2_300x900.png").read_bytes())
    exact = load_file(MD2_SMALL / "expected.safetensors")[f"2.{HIDDEN}"]
    chance, squares = torch.Generator().manual_seed(1), []
    with preparing(loaded, config) as prepare:
        (errors,) = module.expected_errors(config, Formats.of(config, loaded.model), [request], prepare)
        run = PromptRun(loaded.model, config, prepare)
        for _ in range(12):
            for scales in (run.cache.key_scales, run.cache.value_scales):
                assert scales is not None
                scales.copy_(torch.exp2(torch.rand(scales.shape, generator=chance)))
            error = prompt_tensors(run, request)[DECODED_HIDDEN] - exact
            squares.append(error.square().mean().item())
    measured = (sum(squares) / len(squares)) ** 0.5
    assert measured == pytest.approx(errors.tensors[DECODED_HIDDEN].rms, rel=0.35)


def test_a_decode_step_over_a_float8_cache_may_choose_another_expert_where_two_nearly_tie(tmp_path: Path):
    # At this shape the cache's rounding moves the routers' logits of the decoded token by more than the gap of two
    # experts, and the prompt's logits by less.
    write_fixture(tmp_path, shape_of("odd-experts"), with_answers=False)
    assert [case.complaint for case in ReferenceFixture(tmp_path, CONFIG).cases() if case.complaint] == []
