"""Preprocessors of a loaded model, as the engine makes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image

from kestrel_runtime.engine.offending_requests import OffendingRequests
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.imaging.crops import Crops, DecodedImage, keep_decoded
from kestrel_runtime.models.loaded_model import LoadedModel


def new_preprocessor(
    loaded: LoadedModel,
    offending_requests: OffendingRequests | None = None,
    *,
    keeps_decoded: bool = False,
    make_crops: Callable[[Image.Image], Crops | DecodedImage] | None = None,
    **settings: Any,
) -> Preprocessor:
    """One worker, unless `settings` say otherwise; `keeps_decoded`: crops are not made by the worker."""
    config, family = loaded.model.config, loaded.family
    cropping = family.cropping(config)
    if make_crops is None:
        make_crops = partial(keep_decoded, cropping=cropping) if keeps_decoded else cropping.make_crops
    chosen: dict[str, Any] = {"max_context": 1000, "max_image_pixels": 10**6, "num_threads": 1, **settings}
    offending_requests = OffendingRequests() if offending_requests is None else offending_requests
    skills = family.skills(config)
    return Preprocessor(config, skills, loaded.tokenizer, offending_requests, cropping, make_crops, **chosen)
