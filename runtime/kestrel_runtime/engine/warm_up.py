"""Runs a request for each skill before the server accepts calls.

Libraries are imported, kernels compiled and buffers allocated at their first use. Without the warm-up the first
caller would wait for that.
"""

from __future__ import annotations

import io
import logging
import time

from PIL import Image

from kestrel_runtime.api.errors import InvalidRequest, KestrelError
from kestrel_runtime.api.requests import REQUEST_TYPES, Request, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine

_SIDE_PX = 32
_SAMPLING = SamplingParams(max_tokens=2)

_log = logging.getLogger(__name__)


class WarmUpFailed(Exception):
    """Raised if the engine cannot answer a request of our own."""


async def warm_up(engine: LocalEngine) -> None:
    """Run the requests one after the other, and have steps guarded from then on. Raises `WarmUpFailed`.

    A request that exceeds the bounds of the engine is skipped: every caller would be refused it.
    """
    started = time.monotonic()
    for request in _requests():
        if request.skill in engine.info.skills:
            try:
                await engine.submit(request).result()
            except InvalidRequest as error:
                _log.warning("a %s of a small image does not fit: %s", request.skill, error)
            except KestrelError as error:
                raise WarmUpFailed(f"the engine fails a request of its own, a {request.skill}") from error
    engine.guard_steps()
    _log.info("warmed up in %.1f s", time.monotonic() - started)


def _requests() -> list[Request]:
    file = io.BytesIO()
    Image.new("RGB", (_SIDE_PX, _SIDE_PX), "grey").save(file, "PNG")
    image = file.getvalue()
    return [kind.example(image, _SAMPLING) for kind in REQUEST_TYPES]
