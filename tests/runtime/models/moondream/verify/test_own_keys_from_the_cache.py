"""Prompts that read the keys of their own step as the cache stores them: FlashInfer's attention, and deterministic
mode."""

from dataclasses import replace
from functools import partial

import pytest

from kestrel_ops import Kernels
from kestrel_ops.dispatch import module_of
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.verify.reference_fixture import ReferenceFixture
from tests.kernels.test_flashinfer import library

__all__ = ["library"]

FLOAT8_CACHE = EngineConfig(device="cpu", dtype="bfloat16", kv_dtype="float8", text_backend="fused")
FLASHINFER = replace(FLOAT8_CACHE, kernels=(("prefill_attention", "flashinfer"),))
DETERMINISTIC = replace(FLOAT8_CACHE, text_backend="auto", deterministic=True)
WRONG_ANSWER = 1  # which the fixture has, and which is compared in float32 alone


@pytest.fixture
def flashinfer(library, monkeypatch):
    """The double of the library, on a processor."""
    monkeypatch.setattr(module_of("flashinfer", "prefill_attention"), "unsupported", lambda model: None)
    return library


def failed(folder, config):
    return [case.name for case in ReferenceFixture(folder, config).cases() if case.complaint is not None]


@pytest.mark.parametrize("config", [FLASHINFER, DETERMINISTIC], ids=["FlashInfer", "deterministic"])
def test_they_are_held_to_the_tolerance_of_what_they_read(config, tiny_fixture, flashinfer):
    assert failed(tiny_fixture, config) == []


def largest_share(folder, config):
    """The error of the worst tensor, divided by its tolerance."""
    cases = ReferenceFixture(folder, config).cases()
    return max(case.comparison.share for case in cases if case.comparison is not None)


def test_others_are_held_to_the_tolerance_of_keys_that_are_not_rounded(tiny_fixture, flashinfer, monkeypatch):
    """The same numbers come close to it, or exceed it: the tolerance above is not wider than need be for all."""
    own, select = largest_share(tiny_fixture, FLASHINFER), Kernels.select
    double = partial(select, "cpu", {"prefill_attention": "flashinfer"})
    monkeypatch.setattr(Kernels, "select", lambda *_: double())
    assert largest_share(tiny_fixture, FLOAT8_CACHE) > 1.5 * own


def test_two_swapped_heads_are_found_there_as_well(tiny_fixture, flashinfer, monkeypatch):
    select = Kernels.select

    def faulty(*arguments):
        kernels = select(*arguments)
        attention = kernels.prefill_attention
        if attention.__module__.endswith("flashinfer_prefill_attention"):
            return replace(kernels, prefill_attention=lambda *more: attention(*more)[:, [1, 0, 2, 3]])
        return kernels

    monkeypatch.setattr(Kernels, "select", faulty)
    assert failed(tiny_fixture, FLASHINFER)
