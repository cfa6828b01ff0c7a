"""What the code that is compiled of kernels says about them, without a device."""

import importlib.util
import itertools
import os
import re

import pytest
import torch

from tests.kernels.compiled import SHARED_BYTES, Compiler

pytestmark = [
    pytest.mark.usefixtures("warm_starts"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

# Widths, heads and types of which some leave blocks smaller than the threads of a program.
ROWS = [("add_layer_norm", [5, width, delta, "bf16"]) for width in (17, 48, 77, 1152) for delta in ("fp32", "bf16")]
HEADS = [("rotary_write_kv", [*heads, "bf16", "fp8", True]) for heads in ((2, 2, 24), (6, 1, 20), (32, 32, 64))]
SUMS = [
    *(("decode_contract", [batch, width, 48, "fp8"]) for batch in (1, 5) for width in (152, 4096)),
    *(("decode_expand", [5, width, 40, 24, "bf16", 3]) for width in (48, 77)),
]
# Row groups, coefficients, and what they add to.
ADAPTERS = [("add_up_terms", [5, 48, 40, 24, 3, 8])]
# Text and tokens with values.
SAMPLES = [("advance_rows", [5])]
# One token, few and many, of which the last are listed by two kernels.
EXPERTS = [("mixture_of_experts", [count, 48, 24, 6]) for count in (1, 5, 70)]

REGISTERS = 65_536  # of a multiprocessor, on all cards
MOST_SPILLED_BYTES = 1024  # of a thread; Triton 3.6 spills at most a tenth of it, 3.9 more
# Every kernel at the widths of the published models, with launch configurations for one token and for the most.
WIDE = [
    ("add_layer_norm", [5, 1152, "bf16", "bf16"]),
    ("rotary_write_kv", [32, 32, 64, "bf16", "bf16", False]),
    ("concat_gelu", [5, 2048, 8192, "bf16", "bf16"]),
    ("prefill_attention", [32, 32, 64, "bf16", "bf16", 746]),
    ("prefill_attention", [32, 32, 64, "bf16", "bf16", 16]),
    *(("invariant_attention", [32, 32, 64, "bf16", "bf16", longest]) for longest in (746, 1)),
    *(("invariant_linear", [count, 10_240, 2048, "bf16"]) for count in (735, 64)),
    ("decode_expand", [1, 2048, 6144, 8192, "bf16", 0]),
    ("decode_contract", [1, 10_240, 2048, "bf16"]),
    ("step_with_adapters", [128, 2048, 6144, 8192, 8, 32, "bf16"]),
    ("rotary_decode_attention", [32, 32, 64, "bf16", "bf16", 1, 8]),
    ("rotary_decode_attention", [32, 32, 64, "bf16", "bf16", 64, 1]),
    ("resample", [557, 800, 378, 0]),
    ("hash_words", [9, 107_163]),
    ("philox_uniform", [64]),
    ("pick_allowed", [64, 51_200]),
    ("advance_rows", [64]),
    ("layer_norm_linear", [5, 2048, 64]),
    ("tau_scales", [2, 32, 6144]),
    ("tau_scales", [64, 32, 6144]),
    *(("invariant_experts", [count, 2048, 1024, 64, "bf16"]) for count in (1, 3000)),
    ("mixture_of_experts", [1, 2048, 1024, 64, "bf16"]),
    ("mixture_of_experts", [3000, 2048, 1024, 64, "bf16"]),
]

# Cards, and those that are compiled for in their place: with the same types and instructions for products, and with
# no more shared memory.
PLANNED_ALIKE = {"8.0": "8.6", "12.0": "8.9"}
# What spills the most registers is compiled for every card.
MOST_REGISTERS = ("prefill_attention",)

# Experts of 4 bits, which are converted where the card has no float8.
INT4 = [("mixture_of_experts", [count, 2048, 1024, 64, "int4"]) for count in (1, 64, 3000)]
# What Triton computes in float8 alone.
IN_FLOAT8 = [("few_rows", [16, 10_240, 2048])]
# Float8 experts on cards without float8.
WIDENED = [("mixture_of_experts", [count, 2048, 1024, 64, "fp8"]) for count in (1, 3000)]

# All is compiled for all cards where there is a GPU and where somebody asks for it, since to compile all for one
# card takes a minute of processor time. Elsewhere each call is compiled for one card, and the one with the most
# tokens of those that launch the same kernels. Blackwell gets what spills the most registers there.
EVERY_CARD = torch.cuda.is_available() or os.environ.get("EVERY_CARD") == "1"
FEWER_TOKENS = [
    ("prefill_attention", [32, 32, 64, "bf16", "bf16", 16]),
    ("invariant_attention", [32, 32, 64, "bf16", "bf16", 1]),
    ("invariant_linear", [64, 10_240, 2048, "bf16"]),
    ("invariant_experts", [1, 2048, 1024, 64, "bf16"]),
    INT4[1],
]
FOR_BLACKWELL = [
    ("decode_contract", [1, 10_240, 2048, "bf16"]),
    ("mixture_of_experts", [3000, 2048, 1024, 64, "bf16"]),
]
HERE = {
    "8.6": [INT4[0], WIDENED[1]],
    "8.9": [*(call for call in WIDE if call not in (*FEWER_TOKENS, *FOR_BLACKWELL)), INT4[2], *IN_FLOAT8],
    "10.0": FOR_BLACKWELL,
}
needs_every_card = pytest.mark.skipif(not EVERY_CARD, reason="compiled where there is a GPU, or with EVERY_CARD=1")


def in_float8(call):
    """The same with everything in float8 that may be."""
    name, arguments = call
    last = len(arguments) - 1 - arguments[::-1].index("bf16") if "bf16" in arguments else None
    return name, [*arguments[:last], "fp8", *arguments[last + 1 :]] if last is not None else arguments


@pytest.fixture(scope="module")
def compiler(tmp_path_factory, warm_starts):
    with Compiler(tmp_path_factory.mktemp("triton")) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def of_every_call(compiler):
    """What calls launch."""
    calls = [*ROWS, *HEADS, *SUMS, *EXPERTS, *ADAPTERS, *SAMPLES]
    return list(zip(calls, compiler.launches(calls), strict=True))


@pytest.fixture(scope="module")
def launched(of_every_call):
    """Calls that write in place, and what they launch."""
    return of_every_call[: len([*ROWS, *HEADS, *SUMS])]


def test_what_is_written_in_place_was_read_by_every_thread_before(launched):
    for call, kernels in launched:
        in_place = [(kernel, pointer) for kernel in kernels for pointer in kernel.in_place()]
        assert len(in_place) == 1, (call, kernels)
        for kernel, pointer in in_place:
            own = [access for access in kernel.accesses if access.pointer == pointer or access.kind == "barrier"]
            kinds = [access.kind for access in own]
            first_store = kinds.index("store")
            assert "load" not in kinds[first_store:], (call, own)
            assert kinds[first_store - 1] == "barrier", (call, own)


def test_no_thread_holds_what_another_one_holds_of_rows_written_in_place(launched):
    for call, kernels in launched:
        for kernel in kernels:
            own = [access for access in kernel.accesses if access.pointer in kernel.in_place()]
            assert [access for access in own if len(access.shape) > 1 and access.replicas > 1] == [], call


def test_no_sum_is_made_by_atomic_additions(launched):
    kinds = {access.kind for _, kernels in launched for kernel in kernels for access in kernel.accesses}
    assert kinds == {"load", "store", "barrier"}


def test_mixtures_of_experts_write_what_they_do_not_read_and_add_in_one_order(of_every_call):
    found = [kernels for call, kernels in of_every_call if call in EXPERTS]
    assert len(found) == len(EXPERTS)
    for kernels in found:
        assert kernels
        assert [kernel for kernel in kernels if kernel.in_place()] == []
        assert {access.kind for kernel in kernels for access in kernel.accesses} <= {"load", "store", "barrier"}


def test_terms_of_adapters_are_added_where_every_thread_has_read_before(of_every_call):
    written = set()
    for kernels in (kernels for call, kernels in of_every_call if call in ADAPTERS):
        for kernel in kernels:
            in_place = kernel.in_place() - {"counters", "parts"}  # the last program reads what all have stored
            for pointer in in_place:
                own = [
                    access.kind
                    for access in kernel.accesses
                    if access.pointer == pointer or access.kind == "barrier"
                ]
                # A program adds to the columns of one layer, in a branch of its own.
                assert re.fullmatch("((load )+barrier (store )+)+", " ".join([*own, ""])), kernel
            written |= in_place
    assert written == {"out"}


def test_rows_of_the_request_state_are_written_where_every_thread_has_read_before(of_every_call):
    ((of_text, of_values),) = (kernels for call, kernels in of_every_call if call in SAMPLES)
    for kernel in (of_text, of_values):
        assert kernel.in_place() == {"integers"}
        own = [
            access.kind for access in kernel.accesses if access.pointer == "integers" or access.kind == "barrier"
        ]
        assert re.fullmatch("(load )+barrier (store )+", " ".join([*own, ""])), kernel


def calls_for(card, *, every=EVERY_CARD):
    """In float8 where the card has it: what kernels hold is then converted, which takes the most registers."""
    if card in ("8.0", "8.6"):
        return [*WIDE, *WIDENED, *INT4] if every else HERE[card]
    return list(map(in_float8, [*WIDE, *INT4, *IN_FLOAT8] if every else HERE[card]))


def assert_fits(card, call, kernels):
    for kernel in kernels:
        assert kernel.shared_bytes <= SHARED_BYTES[card], (call, kernel)
        assert 32 * kernel.num_warps * kernel.registers <= REGISTERS, (call, kernel)
        assert kernel.spilled_bytes <= MOST_SPILLED_BYTES, (call, kernel)


@pytest.mark.parametrize("card", [card for card in SHARED_BYTES if card not in ("9.0", *PLANNED_ALIKE)])
def test_every_kernel_fits_every_card_from_ampere_on(card, compiler):
    calls = calls_for(card)
    for call, kernels in zip(calls, compiler.resources(card, calls), strict=True):
        assert kernels, call
        assert_fits(card, call, kernels)


def test_every_call_is_compiled_for_one_card_but_those_of_fewer_tokens():
    without, *others = (calls_for(card, every=False) for card in HERE)
    compiled = [*(call for call in without if call not in WIDENED), *itertools.chain(*others)]
    calls, fewer = (list(map(in_float8, each)) for each in ([*WIDE, *INT4, *IN_FLOAT8], FEWER_TOKENS))
    for call in calls:
        assert compiled.count(call) == (call not in fewer), call
    assert {name for name, _ in fewer} <= {name for name, _ in compiled}
    assert WIDENED[1] in without


@needs_every_card
@pytest.mark.parametrize("card", PLANNED_ALIKE)
def test_every_kernel_fits_a_card_with_the_plans_of_another(card, compiler):
    other, calls = PLANNED_ALIKE[card], calls_for(card)
    assert SHARED_BYTES[card] >= SHARED_BYTES[other]
    for call, kernels in zip(calls, compiler.resources(card, calls, unlike=other), strict=True):
        assert_fits(card, call, kernels)
    largest = [call for call in calls if call[0] in MOST_REGISTERS]
    for call, kernels in zip(largest, compiler.resources(card, largest), strict=True):
        assert kernels, call
        assert_fits(card, call, kernels)


def test_what_is_planned_otherwise_than_for_another_card_is_compiled(compiler):
    calls = [("decode_contract", [1, 2048, 64, "bf16"]), ("philox_uniform", [64])]
    (kernel,), alike = compiler.resources("9.0", calls, unlike="8.6")
    assert (kernel.kernel, alike) == ("_contract", [])
