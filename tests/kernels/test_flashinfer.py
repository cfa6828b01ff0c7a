"""What is passed to FlashInfer, by a double of it in plain torch, and what is said where it cannot be used."""

import importlib.metadata
import importlib.util
import logging
import re
import sys
from dataclasses import replace

import pytest
import torch

from kestrel_ops import Kernels, reference
from kestrel_ops.dispatch import function_of, implementation_of, module_of
from tests.kernels import fake_flashinfer
from tests.kernels.implementations import DEVICE, FLOAT8, relative_error
from tests.kernels.paged import Heads, padded
from tests.kernels.test_dispatch import MODEL, TEXT, with_text
from tests.kernels.test_invariant import Context
from tests.kernels.test_rotary_decode_attention import Step

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
OPERATIONS = ("prefill_attention", "rotary_decode_attention")
CHOICES = dict.fromkeys(OPERATIONS, "flashinfer")
HEADS = Heads(4, 2, 16)
HERE = torch.empty(0, device=DEVICE).device


def installed(monkeypatch, version):
    """As if this version of FlashInfer were installed; None is no version."""
    known = importlib.metadata.version

    def of(name):
        if name != fake_flashinfer.PACKAGE:
            return known(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", of)


@pytest.fixture
def library(monkeypatch):
    """The double, as version 0.7.4, on this device."""
    installed(monkeypatch, "0.7.4")
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    caches = [getattr(module_of("flashinfer", name), made) for name, made in zip(OPERATIONS, MADE, strict=True)]
    for cache in caches:
        cache.cache_clear()
    yield caches
    for cache in caches:
        cache.cache_clear()


MADE = ("_prefills", "_decodes")


def by_pages(query, *pages_and_chunks):
    """Attention of prompts whose keys and values are in the pages, as `invariant_attention` is called."""
    return function_of("flashinfer", "prefill_attention")(query, query, query, *pages_and_chunks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [3, 16])
def test_chunks_of_conversations_attend_as_defined(library, dtype, page_size):
    spans = [((0, 9), (12, 20)), (), ((1, 7),), ((4, 9), (9, 17))]
    context = Context([33, 5, 7, 17], spans, HEADS, page_size, dtype=dtype)
    for chunks in (
        [(0, 0, 33), (1, 0, 5), (2, 0, 7), (3, 0, 17)],
        [(3, 4, 17), (0, 12, 20), (0, 20, 21)],
        [(1, 4, 5)],
    ):
        wanted = context.run(reference.invariant_attention, chunks)
        assert relative_error(context.run(by_pages, chunks), wanted) < 1e-2


def test_padding_of_a_step_is_no_part_of_the_plan(library):
    context = Context([9, 5], [((0, 4),), ()], HEADS, 4, dtype=torch.bfloat16)
    wanted = context.run(reference.invariant_attention, [(0, 0, 9), (1, 2, 5)])

    def padded_step(query, keys, values, table, starts, lengths, visible, longest):
        nothing = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        return by_pages(
            torch.cat((query, query[:4])),
            *(keys, values, torch.cat((table, table[:1])), torch.cat((starts, starts[-1:]))),
            *(torch.cat((lengths, nothing[:1])), torch.cat((visible, nothing)), longest),
        )

    got = context.run(padded_step, [(0, 0, 9), (1, 2, 5)])
    assert len(got) == len(wanted) + 4
    assert relative_error(got[:-4], wanted) < 1e-2


def test_a_step_of_padding_alone_computes_nothing(library):
    ints = torch.zeros(3, dtype=torch.int32)
    query, pages = torch.zeros(4, 4, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16)
    assert by_pages(query, pages, pages, ints[:2, None], ints, ints[:2], torch.zeros(4).int(), 1).shape == (
        4,
        4,
        16,
    )


def test_float8_pages_are_read_with_their_scales(library):
    context = Context([20, 9], [((0, 9), (12, 20)), ()], HEADS, 4, dtype=torch.bfloat16)
    scales = torch.tensor([0.5], device=DEVICE), torch.tensor([0.25], device=DEVICE)

    def in_float8(operation):
        def run(query, keys, values, *chunks):
            stored = [
                (pages.float() / scale).to(FLOAT8) for pages, scale in zip((keys, values), scales, strict=True)
            ]
            return operation(query, *stored, *chunks, *scales)

        return run

    chunks = [(0, 0, 20), (1, 8, 9)]
    wanted = context.run(in_float8(reference.invariant_attention), chunks)
    assert relative_error(context.run(in_float8(by_pages), chunks), wanted) < 1e-2


def test_all_layers_of_a_step_have_one_plan(library):
    prefills, _ = library
    context = Context([9, 5], [((0, 4),), ()], HEADS, 4, dtype=torch.bfloat16)

    def all_layers(*arguments):
        return torch.stack([by_pages(*arguments) for _ in range(3)])

    first = context.run(all_layers, [(0, 0, 9)])
    wrapper = prefills(HERE, torch.bfloat16, torch.bfloat16, 16)._wrapper
    assert wrapper.num_plans == 1
    assert torch.equal(first[0], first[2])
    second = context.run(all_layers, [(1, 0, 5)])
    assert wrapper.num_plans == 2
    assert relative_error(second[1], context.run(reference.invariant_attention, [(1, 0, 5)])) < 1e-2


@needs_triton
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FLOAT8], ids=str)
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(4, 1, 24)], ids=str)
def test_new_tokens_are_stored_and_attend_to_all_before_them(library, heads, cache_dtype):
    step = Step([0, 5, -1, 15, 16, 31], heads, cache_dtype=cache_dtype, dtype=torch.bfloat16)
    step.query_scale = (1 + torch.rand(6, heads.num_heads)).to(DEVICE)
    wanted = [step.wanted(row) for row in range(6)]
    tokens = [step.token(row) for row in range(6)]
    attended = step.run(function_of("flashinfer", "rotary_decode_attention"))
    assert (attended[2] == 0).all()  # a row without a token
    for row in (0, 1, 3, 4, 5):
        assert relative_error(attended[row], wanted[row]) < (0.1 if cache_dtype == FLOAT8 else 0.02)
        for stored, token in zip(step.stored(row), tokens[row][1:], strict=True):
            assert relative_error(stored, token[0]) < 0.05


@needs_triton
def test_decode_steps_have_one_plan_for_all_layers(library):
    _, decodes = library
    operation = function_of("flashinfer", "rotary_decode_attention")

    def twice(qkv, *others):
        operation(qkv, *others)
        operation(qkv, *others)

    step = Step([3, 20], cache_dtype=torch.bfloat16, dtype=torch.bfloat16)
    step.run(twice)
    assert decodes(HERE, False)._wrapper.num_plans == 1
    step.run(twice)
    assert decodes(HERE, False)._wrapper.num_plans == 2


@needs_triton
@pytest.mark.parametrize(
    "types", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, FLOAT8), (FLOAT8, FLOAT8)], ids=str
)
def test_what_a_model_needs_can_be_compiled_before_its_first_step(library, types):
    weight_dtype, cache_dtype = types
    text = replace(TEXT, num_heads=2, num_kv_heads=1, weight_dtype=weight_dtype, cache_dtype=cache_dtype)
    kernels = replace(Kernels.select("cpu", {}), **{name: function_of("flashinfer", name) for name in OPERATIONS})
    kernels.prepare(replace(MODEL, device_type=DEVICE, text=text))
    prefills, decodes = library
    assert (prefills.cache_info().currsize, decodes.cache_info().currsize) == (1, 1)


def test_kernels_that_cannot_be_compiled_are_named_and_the_log_has_the_cause(library, monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("Ninja build failed: nvcc: not found")

    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithCausalBidirectionalRangesWrapper", fails)
    kernels = replace(Kernels.select("cpu", {}), prefill_attention=function_of("flashinfer", "prefill_attention"))
    problem = "prefill_attention=flashinfer: its kernels cannot be compiled or loaded: RuntimeError"
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=f"^{problem}$"):
        kernels.prepare(replace(MODEL, device_type="cpu"))
    assert "nvcc: not found" in caplog.text


IN_BFLOAT16 = with_text(weight_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)


@needs_triton
def test_it_is_chosen_where_it_is_named_and_nowhere_else(library):
    kernels = Kernels.select("cuda", CHOICES, IN_BFLOAT16)
    assert {implementation_of(getattr(kernels, name)) for name in OPERATIONS} == {"flashinfer"}
    assert kernels.waiting_for_device() == list(OPERATIONS)
    by_default = Kernels.select("cuda", {}, IN_BFLOAT16)
    assert {implementation_of(getattr(by_default, name)) for name in OPERATIONS} == {"triton"}


@needs_triton
@pytest.mark.parametrize(
    ("model", "version", "reason"),
    [
        (MODEL, None, "flashinfer-python is not installed; the extra `flashinfer` installs it"),
        (MODEL, "0.6.13", "flashinfer-python 0.6.13 is not supported; the extra `flashinfer` installs 0.7.4"),
        (replace(MODEL, device_type="cpu", capability=None), "0.7.4", "needs a CUDA device"),
        (replace(IN_BFLOAT16, capability=(7, 5)), "0.7.4", "needs compute capability 8.0, this device has 7.5"),
        (replace(MODEL, capability=(8, 6)), "0.7.4", "float8 pages needs compute capability 8.9"),
        (replace(MODEL, dtype=torch.float32), "0.7.4", "bfloat16 and float16, not torch.float32"),
        (with_text(head_dim=80), "0.7.4", "64, 128 or 256 dimensions, not 80"),
        (with_text(cache_dtype=torch.float32), "0.7.4", "or float8, not torch.float32"),
    ],
)
def test_a_choice_that_cannot_be_had_is_refused_with_the_reason(model, version, reason, monkeypatch):
    installed(monkeypatch, version)
    with pytest.raises(ValueError, match=f"prefill_attention=flashinfer: .*{re.escape(reason)}"):
        Kernels.select("cuda", {"prefill_attention": "flashinfer"}, model)


@needs_triton
def test_queries_of_float8_weights_need_float8_pages(monkeypatch):
    installed(monkeypatch, "0.7.4")
    model = with_text(weight_dtype=FLOAT8, cache_dtype=torch.bfloat16)
    Kernels.select("cuda", {"prefill_attention": "flashinfer"}, model)
    with pytest.raises(ValueError, match=r"rotary_decode_attention=flashinfer: .* torch.float16, or float8"):
        Kernels.select("cuda", {"rotary_decode_attention": "flashinfer"}, model)


@needs_triton
def test_kernels_of_decode_steps_are_compiled_without_the_library(monkeypatch):
    """In the pass that compiles Triton's kernels, for a card that may not be here."""
    module = module_of("flashinfer", "rotary_decode_attention")
    monkeypatch.setattr(module, "only_compiles", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    written = []
    monkeypatch.setattr(module, "rotary_write_kv", lambda qkv, *_: written.append(qkv.dtype))
    Step([3, 20], cache_dtype=torch.bfloat16, dtype=torch.bfloat16).run(
        lambda *tensors: (tensors[7].zero_(), module.rotary_decode_attention(*tensors))
    )
    assert written == [torch.bfloat16]


def test_contexts_end_within_their_last_page(library):
    plans = sys.modules["kestrel_ops.attention.flashinfer_plans"]
    table = padded([torch.tensor([7, 2, 4]), torch.tensor([5]), torch.tensor([1, 9])]).int()
    contexts = plans.PagedContexts.of(table, torch.tensor([7, 3, 4], dtype=torch.int32), 3)
    assert contexts.starts.tolist() == [0, 3, 4, 6]
    assert contexts.pages.tolist() == [7, 2, 4, 5, 1, 9]
    assert contexts.last_lengths.tolist() == [1, 3, 1]
