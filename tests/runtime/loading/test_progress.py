import itertools
import logging
import time

import pytest
import torch

from kestrel_runtime.loading.progress import INTERVAL_S, with_progress

GIB = 2**30


def weights(*sizes_gib: float) -> list[tuple[str, torch.Tensor]]:
    return [
        (str(number), torch.empty(int(size * GIB), dtype=torch.uint8, device="meta"))
        for number, size in enumerate(sizes_gib)
    ]


def lines_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, interval_s: float) -> list[str]:
    moments = itertools.count(0.0, interval_s)
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    tensors = weights(1, 0.5, 2.5)
    with caplog.at_level(logging.INFO):
        assert list(with_progress(tensors, 4 * GIB)) == tensors
    return [record.getMessage() for record in caplog.records]


def test_loading_that_takes_long_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    assert lines_of(caplog, monkeypatch, INTERVAL_S) == [
        "weights: 1.0 of 4.0 GiB are loaded",
        "weights: 1.5 of 4.0 GiB are loaded",
        "weights: 4.0 of 4.0 GiB are loaded",
    ]


def test_loading_that_is_quick_says_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    assert lines_of(caplog, monkeypatch, INTERVAL_S / 4) == []
