"""Kernels compiled ahead, from the command line. What compiles them has tests of its own."""

from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.__main__ import main
from kestrel_runtime.models.moondream import kernel_compilation
from kestrel_runtime.models.moondream.weights.published import PUBLISHED


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def compile_ahead(name, settings, capability, folder):
        calls.append((name, settings.kv_dtype, capability, folder))
        return 7, Path("kept")

    monkeypatch.setattr(kernel_compilation, "compile_ahead", compile_ahead)
    return calls


def test_each_model_is_compiled_in_the_precisions_that_the_card_has(compiled, capsys):
    assert main(["compile", "--target", "8.0", "--target", "8.9"]) == 0
    assert compiled == [
        (name, cache, capability, None)
        for capability, caches in (((8, 0), ["auto"]), ((8, 9), ["auto", "float8"]))
        for name in PUBLISHED
        for cache in caches
    ]
    assert "moondream3, float8, 8.9: 7 kernels in kept" in capsys.readouterr().out.splitlines()


def test_what_a_card_does_not_have_is_refused(capsys, tmp_path):
    words = ["--target", "8.6", "--model", "moondream2", "--precision", "float8", "--into", str(tmp_path)]
    assert main(["compile", *words]) == 1
    assert "moondream2, float8, 8.6: --text-backend fused-float8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
