"""What captured graphs take of memory: the parts that need no GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import graph_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_without_a_gpu_it_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["graph_memory"])
    assert graph_memory.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
