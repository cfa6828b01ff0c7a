from typing import Any

import pytest
import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.moondream.kernel_shapes import model_shape
from tests.runtime.models.moondream.tiny import random_model, tiny_config

FLOAT8 = torch.float8_e4m3fn


def shape_of(generation=2, text="fused", vision="fused", **settings) -> Any:
    config = tiny_config(generation, n_heads=4, n_kv_heads=2 if generation == 2 else 4)
    model = random_model(config)
    return model_shape(model, EngineConfig(**settings), text, vision)


def test_sizes_are_those_of_the_model_and_of_the_settings():
    shape = shape_of(max_batch_size=5, page_size=3)
    assert (shape.device_type, shape.capability, shape.dtype) == ("cpu", None, torch.float32)
    text, vision = shape.text, shape.vision
    assert (text.dim, text.ff_dim, text.num_heads, text.num_kv_heads) == (32, 32, 4, 2)
    assert (text.head_dim, text.rotary_dim, text.qkv_dim) == (8, 4, 64)
    assert (text.page_size, text.max_batch, text.num_experts) == (3, 5, 0)
    assert (vision.dim, vision.ff_dim, vision.num_heads, vision.num_patches) == (12, 20, 3, 16)
    assert vision.projector_dim == 24
    assert set(shape.widths) == {32, 64, 12, 20, 24}


@pytest.mark.parametrize(
    ("text", "vision", "types"),
    [("fused", "fused-float8", (torch.float32, FLOAT8)), ("fused-float8", "fused", (FLOAT8, torch.float32))],
)
def test_weights_are_of_the_type_of_their_path(text, vision, types):
    shape = shape_of(text=text, vision=vision, kv_dtype="float8")
    assert (shape.text.weight_dtype, shape.vision.weight_dtype) == types
    assert shape.text.cache_dtype == FLOAT8
    assert not shape.vision.has_fixed_scales


def test_only_what_runs_on_fused_operations_has_a_shape():
    assert shape_of(text="plain").text is None
    assert shape_of(vision="plain").vision is None
    assert shape_of(vision="calibrated-float8").vision.has_fixed_scales


def test_the_experts_of_each_token_are_counted():
    text = shape_of(3).text
    assert (text.num_experts, text.experts_per_token) == (4, 2)
