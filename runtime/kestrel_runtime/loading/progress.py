"""Logs how far the weights of a model are loaded, if that takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from torch import Tensor

INTERVAL_S = 5.0
_GIB = 2**30

_log = logging.getLogger(__name__)


def with_progress(tensors: Iterable[tuple[str, Tensor]], num_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the same pairs, with a line in the log every few seconds until they have `num_bytes` together."""
    logged_at_s, done_bytes = time.monotonic(), 0
    for name, tensor in tensors:
        yield name, tensor
        done_bytes += tensor.nbytes
        if time.monotonic() - logged_at_s >= INTERVAL_S:
            logged_at_s = time.monotonic()
            _log.info("weights: %.1f of %.1f GiB are loaded", done_bytes / _GIB, num_bytes / _GIB)
