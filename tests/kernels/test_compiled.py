"""What the code that is compiled of kernels says about them, without a device."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.compiled import launches

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# Widths, heads and types of which some leave blocks smaller than the threads of a program.
ROWS = [("add_layer_norm", [5, width, delta, "bf16"]) for width in (17, 48, 77, 1152) for delta in ("fp32", "bf16")]
HEADS = [(2, 2, 24), (6, 1, 20), (4, 4, 12), (32, 32, 64)]
TURNS = [("rotary_write_kv", [*heads, "bf16", "fp8", True]) for heads in HEADS]


def test_what_is_written_in_place_was_read_by_every_thread_before(tmp_path):
    calls = ROWS + TURNS
    for call, launched in zip(calls, launches(calls, str(tmp_path)), strict=True):
        assert len(launched) > 0
        for launch in launched:
            assert len(launch.in_place()) == 1, (call, launch)
            (pointer,) = launch.in_place()
            own = [access for access in launch.accesses if access.pointer == pointer or access.kind == "barrier"]
            kinds = [access.kind for access in own]
            first_store = kinds.index("store")
            assert "load" not in kinds[first_store:], (call, own)
            assert kinds[first_store - 1] == "barrier", (call, own)
            assert [access for access in own if access.replicas > 1] == [], call
