import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

from kestrel_ops import Kernels, reference
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream.backends import Backends
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig, model_shape
from tests.runtime.models.moondream.tiny import random_model, tiny_config

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def tiny_model(*generation, **heads):
    return random_model(tiny_config(*generation, **heads))


def test_a_cpu_takes_the_plain_paths():
    paths = ExecutionConfig.of(EngineConfig(), "cpu")
    assert (paths.text, paths.vision, paths.with_graphs) == ("plain", "plain", False)
    assert paths.kernels.resample is reference.resample


def test_what_is_asked_for_is_taken():
    paths = ExecutionConfig.of(EngineConfig(text_backend="fused-float8", vision_backend="fused"), "cpu")
    assert (paths.text, paths.vision, paths.with_graphs) == ("fused-float8", "fused", False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cuda_graphs": True, "text_backend": "fused"}, "--cuda-graphs: needs a CUDA device"),
        (
            {"kernels": (("concat_gelu", "cuneiform"), ("sing", "reference"))},
            "concat_gelu=cuneiform, sing=reference",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(settings, message):
    with pytest.raises(CheckpointError, match=message):
        ExecutionConfig.of(EngineConfig(**settings), "cpu")


def test_an_encoder_without_float8_products_for_all_of_it_has_none_with_fixed_scales(caplog):
    model, config = tiny_model(), EngineConfig(text_backend="fused", vision_backend="calibrated-float8")
    paths = ExecutionConfig.of(config, "cpu", model)
    assert paths.vision == "fused-float8"
    assert "vision.enc_dim is 12 and vision.enc_ff_dim 20" in caplog.text
    Backends.of(model, paths, max_batch_size=1)


@needs_triton
def test_a_kernel_that_cannot_serve_the_model_is_refused_only_if_it_was_asked_for(caplog):
    model = tiny_model(n_heads=2, n_kv_heads=2)
    wide = dataclasses.replace(model.config.text, dim=512)  # heads of 256 dimensions
    model.config = dataclasses.replace(model.config, text=wide)
    config = EngineConfig(text_backend="fused", kernels=(("prefill_attention", "triton"),))
    with pytest.raises(CheckpointError, match=r"prefill_attention=triton: heads of 256 dimensions"):
        ExecutionConfig.of(config, "cpu", model)
    paths = ExecutionConfig.of(EngineConfig(text_backend="fused", vision_backend="plain"), "cuda", model)
    assert paths.kernels.prefill_attention is reference.prefill_attention
    assert paths.kernels.decode_expand.__module__ == "kestrel_ops.linear.triton_decode_expand"
    assert "prefill_attention=triton is passed over for reference: heads of 256 dimensions" in caplog.text


@needs_triton
def test_graphs_are_off_where_a_kernel_waits_for_the_device(caplog):
    choice = (("rotary_decode_attention", "reference"),)
    assert ExecutionConfig.of(EngineConfig(), "cuda").with_graphs
    assert not ExecutionConfig.of(EngineConfig(kernels=choice), "cuda").with_graphs
    assert "CUDA graphs are off" in caplog.text
    assert "rotary_decode_attention" in caplog.text
    with pytest.raises(CheckpointError, match="rotary_decode_attention"):
        ExecutionConfig.of(EngineConfig(kernels=choice, cuda_graphs=True), "cuda")
    # What mixes experts waits only where there are experts.
    choice = (("mixture_of_experts", "reference"),)
    assert ExecutionConfig.of(EngineConfig(kernels=choice), "cuda", tiny_model()).with_graphs
    assert not ExecutionConfig.of(EngineConfig(kernels=choice), "cuda", tiny_model(3)).with_graphs


@needs_triton
def test_attention_of_prompts_that_waits_for_the_device_keeps_the_graphs_of_all_other_steps(caplog):
    paths = ExecutionConfig.of(EngineConfig(kernels=(("prefill_attention", "reference"),)), "cuda")
    assert (paths.with_graphs, paths.captures_prefill) == (True, False)
    assert "no CUDA graph captures prefill steps: prefill_attention waits for the device" in caplog.text
    assert ExecutionConfig.of(EngineConfig(), "cuda").captures_prefill


def test_captures_of_prefill_steps_follow_the_kernels():
    model, config = tiny_model(), EngineConfig(text_backend="fused", vision_backend="fused")
    paths = ExecutionConfig.of(config, "cpu", model)
    assert not paths.captures_prefill  # the definition waits
    for captures_prefill in (True, False):
        own = dataclasses.replace(paths, captures_prefill=captures_prefill)
        assert Backends.of(model, own, max_batch_size=1).captures_prefill == captures_prefill


def test_flashinfer_needs_a_cuda_device_and_no_deterministic_mode():
    choice = (("prefill_attention", "flashinfer"), ("rotary_decode_attention", "flashinfer"))
    with pytest.raises(CheckpointError, match="prefill_attention=flashinfer: FlashInfer needs a CUDA device"):
        ExecutionConfig.of(EngineConfig(text_backend="fused", kernels=choice), "cpu", tiny_model())
    with pytest.raises(CheckpointError, match="--kernels: --deterministic has kernels of its own"):
        ExecutionConfig.of(EngineConfig(deterministic=True, kernels=choice), "cuda")
    with pytest.raises(CheckpointError, match="concat_gelu=flashinfer"):
        ExecutionConfig.of(EngineConfig(kernels=(("concat_gelu", "flashinfer"),)), "cuda")


def test_a_start_fails_where_kernels_of_a_library_cannot_be_compiled(monkeypatch):
    def fail(*_):
        raise ValueError("prefill_attention=flashinfer: its kernels cannot be compiled or loaded: RuntimeError")

    monkeypatch.setattr(Kernels, "prepare", fail)
    model, config = tiny_model(), EngineConfig(text_backend="fused", vision_backend="fused")
    with pytest.raises(CheckpointError, match="prefill_attention=flashinfer: its kernels cannot be compiled"):
        ExecutionConfig.of(config, "cpu", model).prepare_kernels(model, config)


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
