import contextlib
import importlib
import importlib.util
import logging
from dataclasses import fields, replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

import kestrel_ops
from kestrel_ops import Kernels, ModelShape, TextShape, VisionShape, reference
from kestrel_ops.dispatch import has_implementation, implementation_of, module_of
from tests.kernels import launched
from tests.kernels.implementations import FLOAT8

READ_ON_THE_HOST = (DataDependentOutputException, DynamicOutputShapeException)
OPERATIONS = [field.name for field in fields(Kernels)]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# Moondream 2 in float8 on a Hopper device.
TEXT = TextShape(
    dim=2048,
    ff_dim=8192,
    num_heads=32,
    num_kv_heads=32,
    head_dim=64,
    rotary_dim=32,
    page_size=16,
    max_batch=64,
    weight_dtype=FLOAT8,
    cache_dtype=FLOAT8,
)
VISION = VisionShape(
    dim=1152,
    ff_dim=4304,
    num_heads=16,
    num_patches=729,
    projector_dim=8192,
    weight_dtype=FLOAT8,
    has_fixed_scales=True,
)
MODEL = ModelShape("cuda", (9, 0), torch.bfloat16, TEXT, VISION)


def with_text(**changes):
    return replace(MODEL, text=replace(TEXT, **changes))


def with_vision(**changes):
    return replace(MODEL, vision=replace(VISION, **changes))


def chosen(model, choices=None):
    """Implementations by operation, on a CUDA device."""
    kernels = Kernels.select("cuda", choices or {}, model)
    return {name: implementation_of(getattr(kernels, name)) for name in OPERATIONS}


def implementations():
    """Every module beside the definitions that has an operation, as (implementation, operation)."""
    for name in ("cuda", "triton", "library"):
        for operation in OPERATIONS:
            if has_implementation(name, operation):
                yield name, operation


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_cpu_takes_the_definitions(operation):
    assert getattr(Kernels.select("cpu", {}), operation) is getattr(reference, operation)


@needs_triton
def test_a_cuda_device_takes_what_is_faster():
    kernels = Kernels.select("cuda", {})
    modules = {implementation_of(getattr(kernels, name)) for name in OPERATIONS}
    assert modules == {"cuda", "triton", "library"}


@needs_triton
def test_a_published_model_gets_the_fastest_of_everything(caplog):
    with caplog.at_level(logging.WARNING):
        assert chosen(MODEL) == chosen(None)
    assert caplog.records == []


@needs_triton
def test_every_implementation_says_what_it_cannot_serve():
    found = list(implementations())
    assert len(found) > 10
    for name, operation in found:
        unsupported = module_of(name, operation).unsupported
        assert unsupported(MODEL) is None, (name, operation)
        assert unsupported(replace(MODEL, text=None, vision=None)) is None, (name, operation)


@needs_triton
@pytest.mark.parametrize(
    ("model", "operation", "fallback", "reason"),
    [
        (with_text(head_dim=192), "prefill_attention", "reference", "heads of 192 dimensions"),
        (with_text(head_dim=192), "rotary_decode_attention", "reference", "heads of 192 dimensions"),
        (with_text(head_dim=192), "rotary_write_kv", "reference", "heads of 192 dimensions"),
        (with_text(ff_dim=80_000), "decode_contract", "reference", "rows of 82048 values"),
        (with_text(ff_dim=80_000), "concat_gelu", "reference", "rows of 82048 values"),
        (with_vision(dim=48, num_heads=4), "crop_attention", "library", "heads of 16 to 80 dimensions"),
        (with_vision(dim=48, num_heads=2, num_patches=49), "crop_attention", "library", "more than 96 patches"),
        (with_vision(num_patches=1600), "crop_attention", "library", "do not fit into shared memory"),
        (with_vision(dim=40), "scaled_linear_gelu", "reference", "multiples of 16, not 40"),
        (with_vision(ff_dim=104), "scaled_linear_add", "reference", "multiples of 16, not 1152 and 104"),
        (replace(MODEL, dtype=torch.float32), "crop_attention", "library", "not torch.float32"),
        (replace(MODEL, dtype=torch.float32), "scaled_linear_add", "reference", "not to torch.float32"),
        (replace(MODEL, dtype=torch.float32, text=None), "crop_attention", "library", "float32"),
        (replace(MODEL, capability=(10, 0)), "crop_attention", "library", "written for compute capability 9.0"),
        (replace(with_text(num_experts=64), capability=(8, 9)), "mixture_of_experts", "triton", "for compute"),
        (replace(MODEL, capability=(8, 0)), "scaled_linear", "reference", "needs compute capability 8.9"),
        (replace(MODEL, capability=(8, 0)), "decode_expand", "reference", "float8 in Triton needs"),
        (replace(MODEL, capability=(7, 5)), "resample", "reference", "Triton needs compute capability 8.0"),
        (replace(MODEL, capability=(8, 9), dtype=torch.float16), "scaled_linear", "reference", "give bfloat16"),
    ],
)
def test_what_an_implementation_cannot_serve_goes_to_the_next_and_is_logged(
    model, operation, fallback, reason, caplog
):
    fastest = chosen(MODEL)[operation]
    with caplog.at_level(logging.INFO):
        caplog.clear()
        assert chosen(model)[operation] == fallback
    (record,) = (record for record in caplog.records if f" {operation}={fastest} is passed over" in record.message)
    assert f"for {fallback}: " in record.message
    assert reason in record.message
    assert record.levelno == (logging.WARNING if fallback == "reference" else logging.INFO)


@needs_triton
@pytest.mark.parametrize(
    "model",
    [
        with_text(dim=48, ff_dim=77, num_heads=2, num_kv_heads=1, head_dim=24, rotary_dim=12),
        with_text(head_dim=20, rotary_dim=10, page_size=3),
        replace(MODEL, text=replace(TEXT, weight_dtype=torch.float32), vision=None, dtype=torch.float32),
    ],
)
def test_odd_dimensions_of_the_text_are_no_reason_to_fall_back(model):
    text = ("rotary_write_kv", "prefill_attention", "decode_expand", "decode_contract", "rotary_decode_attention")
    assert {chosen(model)[operation] for operation in text} == {"triton"}


@needs_triton
def test_a_part_that_runs_plain_asks_for_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        chosen(replace(with_text(head_dim=192), text=None))
        chosen(replace(with_vision(dim=40), vision=None))
    assert caplog.records == []


@needs_triton
def test_a_choice_goes_first():
    kernels = Kernels.select("cuda", {"concat_gelu": "reference"}, MODEL)
    assert kernels.concat_gelu is reference.concat_gelu
    assert kernels.add_layer_norm.__module__ == "kestrel_ops.norms.triton_add_layer_norm"


@needs_triton
def test_a_choice_that_cannot_serve_the_model_is_refused_with_the_reason():
    choices = {"crop_attention": "cuda", "prefill_attention": "triton", "scaled_linear": "library"}
    model = replace(with_text(head_dim=192), vision=replace(VISION, num_patches=49))
    with pytest.raises(ValueError, match=r"crop_attention=cuda: .*96 patches.*; prefill_attention=triton: .*192"):
        Kernels.select("cuda", choices, model)


def test_without_triton_the_library_and_the_definitions_serve(monkeypatch, caplog):
    load = importlib.import_module

    def import_module(name):
        if ".triton_" in name or name == "kestrel_ops.attention.library_crop_attention":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return load(name)

    monkeypatch.setattr("kestrel_ops.dispatch.importlib.import_module", import_module)
    with caplog.at_level(logging.WARNING):
        kernels = Kernels.select("cuda", {})
    assert kernels.add_layer_norm is reference.add_layer_norm
    assert kernels.scaled_linear.__module__ == "kestrel_ops.linear.library_scaled_linear"
    assert "add_layer_norm=triton is passed over for reference: triton is not installed" in caplog.text


def test_the_choice_is_logged(caplog):
    """At DEBUG: it is of no use to somebody who starts a server for the first time."""
    with caplog.at_level(logging.DEBUG):
        Kernels.select("cpu", {})
    (line,) = (record for record in caplog.records if "=reference" in record.message)
    assert line.levelno == logging.DEBUG
    assert all(f"{operation}=reference" in line.message for operation in OPERATIONS)


def test_what_there_is_not_is_refused_by_name():
    choices = {"concat_gelu": "cuneiform", "sing": "reference", "crop_attention": "triton"}
    with pytest.raises(ValueError, match=r"concat_gelu=cuneiform, sing=reference, crop_attention=triton"):
        Kernels.select("cpu", choices)


def test_shapes_are_part_of_the_public_face():
    assert {"ModelShape", "TextShape", "VisionShape", "Kernels"} <= set(kestrel_ops.__all__)


# A call of each operation, by a function of `tests.kernels.launched`.
CALLS = {
    "resample": (20, 30, 7, 0),
    "hash_words": (3, 50),
    "philox_uniform": (20,),
    "pick_allowed": (3, 50),
    "advance_rows": (3,),
    "add_layer_norm": (5, 48, "bf16", "bf16"),
    "concat_gelu": (3, 16, 40, "bf16", "bf16"),
    "scaled_linear": (5, 32, 48, "bf16"),
    "scaled_linear_gelu": (5, 32, 48),
    "scaled_linear_add": (5, 32, 48),
    "crop_attention": (2, 9, 2, 8),
    "rotary_write_kv": (4, 2, 16, "fp32", "fp32", True),
    "prefill_attention": (4, 2, 16, "fp32", "fp32", 7),
    "decode_expand": (3, 32, 48, 16, "bf16", 2),
    "decode_contract": (3, 48, 32, "bf16"),
    "rotary_decode_attention": (4, 2, 16, "fp32", "fp32", 3, 1),
    "layer_norm_linear": (5, 16, 8),
    "mixture_of_experts": (5, 16, 8, 4),
    "tau_scales": (5, 2, 48),
    "add_low_rank": (5, 16, 8, 3, 4),
    "rows_by_slot": (5, 3, 4, True),
    "add_up_terms": (5, 16, 48, 32, 3, 4),
    "add_down_terms": (5, 16, 32, 3, 4),
    "invariant_linear": (5, 32, 48, "bf16"),
    "invariant_attention": (4, 2, 16, "fp32", "fp32", 7),
    "invariant_experts": (5, 16, 8, 4, "bf16"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_definitions_that_wait_for_the_device_say_so(operation):
    # Tensors without values: what reads one on the host fails.
    waits = operation in Kernels.select("cpu", {}).waiting_for_device()
    with FakeTensorMode():
        expectation = pytest.raises(READ_ON_THE_HOST) if waits else contextlib.nullcontext()
        with expectation:
            getattr(launched, operation)(*CALLS[operation], of="reference")


@needs_triton
def test_of_the_fastest_none_waits_for_the_device():
    assert Kernels.select("cuda", {}, MODEL).waiting_for_device() == []
    choices = {"rotary_decode_attention": "reference", "add_layer_norm": "reference"}
    assert Kernels.select("cuda", choices, MODEL).waiting_for_device() == ["rotary_decode_attention"]
