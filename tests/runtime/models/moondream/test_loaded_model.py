"""From a configuration to a model in memory."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL


def test_weights_take_the_type_asked_for_and_float8_experts_keep_theirs():
    loaded = LoadedModel.load(EngineConfig(model=str(MD3_SMALL), device="cpu", dtype="bfloat16"))
    types = {name: tensor.dtype for name, tensor in loaded.model.named_parameters()}
    assert types.pop("text.blocks.1.mlp.fc1.weight") is torch.float8_e4m3fn
    assert types.pop("text.blocks.1.mlp.fc1.scale") is torch.float32
    assert types["text.wte"] is types["vision.pos_emb"] is torch.bfloat16


def test_auto_is_float32_on_the_cpu():
    loaded = LoadedModel.load(EngineConfig(model=str(MD2_SMALL), device="cpu"))
    assert loaded.model.dtype is torch.float32
    assert loaded.model.device.type == "cpu"


def test_scales_are_not_counted_as_parameters(moondream3: LoadedModel):
    scales = sum(t.numel() for name, t in moondream3.model.named_parameters() if name.endswith(".scale"))
    everything = sum(tensor.numel() for tensor in moondream3.model.parameters())
    assert scales > 0
    assert moondream3.num_parameters == everything - scales


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_cuda_without_a_gpu_is_refused_in_words():
    with pytest.raises(CheckpointError, match="torch finds none"):
        LoadedModel.load(EngineConfig(model=str(MD2_SMALL), device="cuda"))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path):
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(MD2_SMALL / file, tmp_path / file)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 640, "content": "extra"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="641 tokens, the model only 640"):
        LoadedModel.load(EngineConfig(model=str(tmp_path)))
