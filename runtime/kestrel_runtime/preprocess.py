"""Worker threads: a request's image bytes and words → a `Sequence` ready to be scheduled.

Knows skills, the tokenizer and images; knows no pages and no model.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from PIL import Image

from kestrel_runtime.culprits import Culprits, fingerprint_of
from kestrel_runtime.errors import ContextLengthExceeded, RequestRefused
from kestrel_runtime.images import Crops, UncutImage, decode_image, make_crops
from kestrel_runtime.models.moondream.config import MoondreamConfig, VisionConfig
from kestrel_runtime.requests import Request
from kestrel_runtime.sequence import Sequence, SequenceClock
from kestrel_runtime.skills import SKILLS
from kestrel_runtime.tokenizer import Tokenizer
from kestrel_runtime.tokens import Token
from kestrel_runtime.workers import Workers


class Preprocessor:
    """Prepares requests on a pool of threads."""

    def __init__(
        self,
        config: MoondreamConfig,
        tokenizer: Tokenizer,
        culprits: Culprits,
        *,
        max_context: int,
        max_image_pixels: int,
        num_threads: int,
        ageing_s: float = 10.0,
        cut: Callable[[Image.Image, VisionConfig], Crops | UncutImage] = make_crops,
    ) -> None:
        """`cut` makes of an RGB image what the engine takes; it is called by all the threads."""
        self._config = config
        self._tokenizer = tokenizer
        self._culprits = culprits
        self._max_context = max_context
        self._max_image_pixels = max_image_pixels
        self._cut = cut
        self._ids = itertools.count(1)
        self._ageing_s = ageing_s
        self._workers = Workers(num_threads, "kestrel-preprocess")

    def submit(self, request: Request, clock: SequenceClock, tenant: str = "") -> Future[Sequence]:
        """Have a worker `prepare` the request; the future can be cancelled until one does.

        Who waits for a worker goes by priority and age, as who waits for pages does.
        """
        urgency = clock.submitted + self._ageing_s * request.options.priority
        return self._workers.submit(partial(self.prepare, request, clock, tenant), urgency)

    def prepare(self, request: Request, clock: SequenceClock, tenant: str = "") -> Sequence:
        """Decode, cut and tokenise.

        Raises `InvalidRequest`, mostly as `ImageError` or `ContextLengthExceeded`; `RequestRefused`; and, before
        any work is spent, `DeadlineExceeded` and `QueueTimeout`.
        """
        clock.preprocess_started = time.monotonic()
        lateness = clock.lateness(clock.preprocess_started)
        if lateness is not None:
            raise lateness
        fingerprint = fingerprint_of(request)
        if fingerprint in self._culprits:
            raise RequestRefused(f"{fingerprint} has failed before")
        config, skill = self._config, SKILLS[request.skill]
        prompt = [Token(config.tokenizer.bos_id), *skill.prompt(request, self._tokenizer, config)]
        num_image_tokens = 0 if request.image is None else config.vision.num_image_tokens
        num_positions = len(prompt) + num_image_tokens
        if num_positions >= self._max_context:
            raise ContextLengthExceeded(skill.text_field, num_positions, self._max_context)
        crops = None
        if request.image is not None:
            image = decode_image(request.image, max_image_pixels=self._max_image_pixels)
            crops = self._cut(image, config.vision)
        sampling, defaults = request.sampling, skill.defaults
        clock.prepared = time.monotonic()
        return Sequence(
            id=next(self._ids),
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            num_image_tokens=num_image_tokens,
            crops=crops,
            reader=skill.reader(request, self._tokenizer, config),
            temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
            top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            max_context=self._max_context,
            clock=clock,
            fingerprint=fingerprint,
            priority=request.options.priority,
            tenant=tenant,
        )

    def close(self) -> None:
        """Drop what has not begun and wait for the workers."""
        self._workers.close()
