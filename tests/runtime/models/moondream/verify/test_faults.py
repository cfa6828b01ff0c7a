"""Bounds that follow from a format are not so wide that a fault fits in: single ones in one layer are found."""

import itertools
from dataclasses import replace
from functools import partial

import pytest

from kestrel_ops import Kernels
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.verify.reference_fixture import ReferenceFixture

PATHS = {
    "bfloat16": EngineConfig(device="cpu", dtype="bfloat16", text_backend="fused"),
    "float8": EngineConfig(device="cpu", dtype="bfloat16", text_backend="fused-float8"),
    "float8 cache": EngineConfig(device="cpu", dtype="bfloat16", text_backend="fused", kv_dtype="float8"),
}
every_path = pytest.mark.parametrize("config", PATHS.values(), ids=PATHS)


@pytest.fixture(scope="module")
def known():
    """The fixture by configuration; it knows the errors that correct paths have, which take most of the time."""
    return {}


@pytest.fixture
def failed(tiny_fixture, known, monkeypatch):
    """The cases that fail with an operation replaced by what `fault` makes of it.

    What errors correct paths have is found without a fault, unless it is to be `simulated_anew`, with the fault.
    """
    select = Kernels.select

    def run(config, operation="resample", fault=lambda operation: operation, *, simulated_anew=False):
        def faulty(*arguments):
            kernels = select(*arguments)
            return replace(kernels, **{operation: fault(getattr(kernels, operation))})

        if config not in known:
            known[config] = ReferenceFixture(tiny_fixture, config)
            list(known[config].cases())
        fixture = ReferenceFixture(tiny_fixture, config) if simulated_anew else known[config]
        with monkeypatch.context() as patched:
            patched.setattr(Kernels, "select", faulty)
            return [case.name for case in fixture.cases() if case.complaint is not None]

    return run


def at_call(number, change):
    """An operation to which `change` happens at its call of this number, counted in each prompt and from 0."""

    def fault(operation):
        calls = itertools.count()

        def run(*arguments):
            return change(operation, *arguments) if next(calls) == number else operation(*arguments)

        return run

    return fault


@every_path
def test_without_a_fault_everything_holds(failed, config):
    assert failed(config) == []


def swapped_heads(attention, *arguments):
    return attention(*arguments)[:, [1, 0, 2, 3]]


@every_path
def test_two_swapped_heads_of_one_layer_are_found(failed, config):
    assert failed(config, "prefill_attention", at_call(1, swapped_heads))


def test_a_fault_does_not_widen_its_own_bounds(failed):
    fault = "prefill_attention", at_call(1, swapped_heads)
    found = failed(PATHS["bfloat16"], *fault, simulated_anew=True)
    assert found == failed(PATHS["bfloat16"], *fault)
    assert found


@every_path
def test_a_residual_that_is_added_twice_is_found(failed, config):
    def twice(add_layer_norm, hidden, delta, *arguments):
        hidden += delta
        return add_layer_norm(hidden, delta, *arguments)

    assert failed(config, "add_layer_norm", at_call(2, twice))


@every_path
def test_one_product_of_a_wrong_scale_is_found(failed, config):
    def scaled(scaled_linear, *arguments):
        return scaled_linear(*arguments) * 2

    assert failed(config, "scaled_linear", at_call(2, scaled))


@every_path
def test_experts_in_a_wrong_order_are_found(failed, config):
    def rolled(mixture_of_experts, hidden, logits, *arguments):
        return mixture_of_experts(hidden, logits.roll(1, dims=1), *arguments)

    assert failed(config, "mixture_of_experts", at_call(0, rolled))


@every_path
def test_a_fault_of_decode_steps_alone_is_found_by_the_decoded_token(failed, config):
    def doubled(decode_contract, activations, *arguments):
        decode_contract(activations * 2, *arguments)

    # In one layer alone it is found in bfloat16, but in float8 the bound on a single row is too wide for that.
    fault = at_call(1, doubled) if config.text_backend == "fused" else lambda operation: partial(doubled, operation)
    names = failed(config, "decode_contract", fault)
    assert names
    assert all("decode step" in name for name in names)


@every_path
def test_two_swapped_heads_of_a_decode_step_are_found_by_the_decoded_token(failed, config):
    def swapped(attention, *arguments):
        attention(*arguments)
        attended = arguments[7].view(1, 4, -1)
        attended.copy_(attended[:, [1, 0, 2, 3]])

    # As above: in float8 a single row of one layer alone does not show it.
    is_float8 = config.text_backend == "fused-float8"
    fault = (lambda operation: partial(swapped, operation)) if is_float8 else at_call(1, swapped)
    names = failed(config, "rotary_decode_attention", fault)
    assert names
    assert all("decode step" in name for name in names)
