"""Random checkpoints: what the runtime makes of them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bench.harness.workload import QUESTIONS, chart
from bench.random_weights import write_random_model
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.events import FinishReason
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.weights.checkpoint import expected_tensors
from kestrel_runtime.models.moondream.weights.published import PUBLISHED
from tests.bench.small import SMALL_2, SMALL_3

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.mark.parametrize(
    ("config", "fp8_experts"),
    [(SMALL_2, False), (SMALL_3, False), (SMALL_3, True)],
    ids=["moondream2", "moondream3", "moondream3-fp8"],
)
async def test_an_answer_is_exactly_as_long_as_asked(tmp_path: Path, config: MoondreamConfig, fp8_experts: bool):
    write_random_model(tmp_path, config, torch.device("cpu"), fp8_experts=fp8_experts)
    engine = LocalEngine.start(EngineConfig(model=str(tmp_path), device="cpu", max_batch_size=2))
    try:
        finished = await engine.submit(Query(QUESTIONS[0], image=chart(1), sampling=GREEDY)).result()
    finally:
        engine.close()
    assert finished.finish_reason is FinishReason.LENGTH
    assert finished.usage.num_output_tokens == 5
    # Image and BOS, a template of 3, a question of 11, and what opens an answer: once more in Moondream 2.
    assert finished.usage.num_input_tokens == 730 + 3 + 11 + (1 if config.text.moe else 2)


def test_float8_experts_come_in_the_training_layout_with_scales(tmp_path: Path):
    write_random_model(tmp_path, SMALL_3, torch.device("cpu"), fp8_experts=True)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert weights.get_tensor("text_model.transformer.h.1.mlp.experts.weight").dtype is torch.float8_e4m3fn
    assert {
        "text_model.transformer.h.1.moe_quant.up_scale",
        "text_model.transformer.h.0.kv_quantizer.k_scale",
    } <= names


@pytest.mark.parametrize(("name", "num_parameters"), [("moondream2", 1.93e9), ("moondream3", 9.27e9)])
def test_full_size_models_have_the_published_number_of_parameters(name: str, num_parameters: float):
    config, fp8_experts = PUBLISHED[name]
    shapes = expected_tensors(config, fp8_experts=fp8_experts).values()
    total = sum(torch.Size(shape).numel() for shape in shapes)
    assert total == pytest.approx(num_parameters, rel=0.01)
