"""Prepares requests as an engine does, for a model whose steps are run by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.models.family import Prepare, config_of
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.sequence import SequenceClock


@contextmanager
def preparing(loaded: LoadedModel, config: EngineConfig) -> Iterator[Prepare]:
    """Returns a context in which requests are prepared on the calling thread."""
    model_config = config_of(loaded.model)
    cropping = loaded.family.cropping(model_config)
    preprocessor = Preprocessor(
        model_config,
        loaded.family.skills(model_config),
        loaded.tokenizer,
        PoisonRequests(),
        cropping,
        cropping.make_crops,
        max_context=model_config.max_context,
        max_image_pixels=config.max_image_pixels,
        num_threads=1,
    )
    try:
        yield lambda request: preprocessor.prepare(request, SequenceClock(submitted=time.monotonic()))
    finally:
        preprocessor.close()
