"""Preprocessors of a loaded model, as the engine makes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image

from kestrel_runtime.engine.offending_requests import OffendingRequests
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles, keep_decoded
from kestrel_runtime.models.loaded_model import LoadedModel


def new_preprocessor(
    loaded: LoadedModel,
    offending_requests: OffendingRequests | None = None,
    *,
    keeps_decoded: bool = False,
    make_tiles: Callable[[Image.Image], Tiles | DecodedImage] | None = None,
    **settings: Any,
) -> Preprocessor:
    """One worker, unless `settings` say otherwise; `keeps_decoded`: tiles are not made by the worker."""
    config, family = loaded.model.config, loaded.family
    tiling = family.tiling(config)
    if make_tiles is None:
        make_tiles = partial(keep_decoded, tiling=tiling) if keeps_decoded else tiling.make_tiles
    chosen: dict[str, Any] = {"max_context": 1000, "max_image_pixels": 10**6, "num_threads": 1, **settings}
    offending_requests = OffendingRequests() if offending_requests is None else offending_requests
    skills = family.skills(config)
    return Preprocessor(config, skills, loaded.tokenizer, offending_requests, tiling, make_tiles, **chosen)
