"""Requests of our own, to tell a broken device from a poisoned request."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

from PIL import Image

from kestrel_runtime.api.errors import ContextLengthExceeded
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.scheduling.sequence import Sequence, SequenceClock


def new_probes(preprocessor: Preprocessor) -> Iterator[Sequence]:
    """A short question, and the same about a small grey image where the cache has room for one."""
    greedy = SamplingParams(temperature=0.0)
    yield preprocessor.prepare(Query("hello", sampling=greedy), SequenceClock(time.monotonic()))
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "grey").save(file, "PNG")
    try:
        yield preprocessor.prepare(
            Query("hello", file.getvalue(), sampling=greedy), SequenceClock(time.monotonic())
        )
    except ContextLengthExceeded:
        return
