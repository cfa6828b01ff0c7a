"""Preprocessors of a loaded model, as the engine makes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image

from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.imaging.crops import Crops, DecodedImage, keep_decoded
from kestrel_runtime.models.loaded_model import LoadedModel


def new_preprocessor(
    loaded: LoadedModel,
    poison_requests: PoisonRequests | None = None,
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
    poison_requests = PoisonRequests() if poison_requests is None else poison_requests
    skills = family.skills(config)
    return Preprocessor(config, skills, loaded.tokenizer, poison_requests, cropping, make_crops, **chosen)
