"""Turns requests into sequences: decodes the image and divides it into crops, builds and tokenises the prompt.

Worker threads do this. If the image is known and cached, and small or stored, little work is left, and the thread
that submits the request does it at once. While the engine is idle, that thread makes the prompt of a request as a
worker decodes its image, and the engine thread plans its step as the worker makes its crops:

    submitting thread  │read header│        │prompt│
    worker                         │decode─────────────│pixels to the device, crops│
    engine thread                                      │plan│ …wait… │encode │hash crops
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, NamedTuple

from msgspec import Struct
from PIL import Image

from kestrel_runtime.api.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    ImageError,
    InternalError,
    KestrelError,
    RequestRefused,
)
from kestrel_runtime.api.images import DecodedPixels as SharedPixels
from kestrel_runtime.api.images import Image as RequestImage
from kestrel_runtime.api.images import RemoteImage, image_digest, is_hashed_at_once
from kestrel_runtime.api.requests import CachePolicy, Chat, Embed, Request, locate
from kestrel_runtime.engine.answer_end_check import EndCheck
from kestrel_runtime.engine.poison_requests import PoisonRequests, fingerprint_of
from kestrel_runtime.engine.recent import LruCache, Matchers, Prompts
from kestrel_runtime.engine.workers import Interrupted, Job, Result, Workers
from kestrel_runtime.fairness.image_budget import MAX_DECODING_BYTES, MemoryBudget
from kestrel_runtime.imaging.crops import Cropping, Crops, DecodedImage, crops_bytes, kept_bytes
from kestrel_runtime.imaging.decoding import decode_image, image_of, inspect_image
from kestrel_runtime.imaging.header import ImageHeader
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import ModelConfig, Skill
from kestrel_runtime.output.embedding import EmbeddingParser
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.cache_keys import CacheScope, Digest, EmbeddingKey, ImageContent, PrefixKeyMaker
from kestrel_runtime.scheduling.sequence import (
    AdapterLease,
    CacheState,
    SequenceClock,
    SequenceImage,
    SequenceRequest,
    TokenSequence,
)

_MAX_TEXT_LENGTH_AT_ONCE = 512
"""The most characters in the text of a request that the submitting thread prepares."""
_MAX_KNOWN_IMAGES = 4096
_CROP_COPIES = 3
"""The copies of an image's crops while they are computed: the resized image, its array, and the crops."""


class ImageFacts(Struct):
    """The facts about an image."""

    digest: bytes | None
    """The digest of the image; None if it has not been computed yet."""
    num_bytes: int
    """The most memory that decoding the image and computing its crops takes."""
    num_kept_bytes: int
    """The most memory of the image once it is decoded."""
    size_px: tuple[int, int] | None = None
    """Its width and height, upright; None until it has been decoded once."""
    header: ImageHeader | None = None
    """Its header; None once it has been decoded, and for an image in another process."""


class DecodedPixels(NamedTuple):
    """A decoded image of a request."""

    pixels: Crops | DecodedImage
    size_px: tuple[int, int]
    """Its width and height."""


class SharedImages:
    """The images of all parts of a request: the first part decodes them for all. Safe in any thread."""

    def __init__(self) -> None:
        self.facts: list[ImageFacts] | None = None
        """The facts about the images, once they are decoded."""
        self.decoded: dict[bytes, DecodedPixels] = {}
        """The decoded images by digest."""
        self._lock = threading.Lock()
        self._turn: Future[None] | None = None  # done when the preparation that decodes has ended
        self._error: Exception | None = None

    def prepare(
        self, start: Callable[[], Future[TokenSequence] | TokenSequence]
    ) -> Future[TokenSequence] | TokenSequence:
        """Prepare a part by `start`: the first part at once, the others when it is prepared.

        If the first part fails by its image, the others fail too; if it fails by its text or is cancelled, the next
        one takes its place. Raises the errors of `start`.
        """
        with self._lock:
            turn, is_first = self._turn, self._turn is None
            if turn is None:
                turn = self._turn = Future()
        if is_first:
            return self._prepare_first(turn, start)
        if not turn.done():
            return _Following(turn, partial(self.prepare, start))
        if self._error is not None:
            # One error for all would collect their tracebacks.
            raise copy.copy(self._error) if isinstance(self._error, KestrelError) else InternalError(self._error)
        return start()

    def _prepare_first(
        self, turn: Future[None], start: Callable[[], Future[TokenSequence] | TokenSequence]
    ) -> Future[TokenSequence] | TokenSequence:
        try:
            preparation = start()
        except BaseException:
            self._turn = None
            turn.set_result(None)
            raise
        if isinstance(preparation, TokenSequence):
            turn.set_result(None)
        else:
            preparation.add_done_callback(partial(self._end_turn, turn))
        return preparation

    def _end_turn(self, turn: Future[None], done: Future[TokenSequence]) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ImageError) or (isinstance(error, Exception) and not isinstance(error, KestrelError)):
            self._error = error
        elif done.cancelled() or error is not None:  # its caller has gone, or its text is refused: others go on
            self._turn = None
        turn.set_result(None)


class _Following(Future[TokenSequence]):
    """A preparation that begins when `turn` is done. It can be cancelled before, and until a worker starts it."""

    def __init__(self, turn: Future[None], start: Callable[[], Future[TokenSequence] | TokenSequence]) -> None:
        super().__init__()
        self._start: Callable[[], Future[TokenSequence] | TokenSequence] | None = start
        self._current: Future[TokenSequence] | None = None
        turn.add_done_callback(self._begin)

    def cancel(self) -> bool:
        if super().cancel():
            self._start = None  # it refers to the request's image
            return True
        return self._current is not None and self._current.cancel()

    def _begin(self, _: Future[None]) -> None:
        start, self._start = self._start, None
        if start is None or not self.set_running_or_notify_cancel():
            return
        try:
            preparation = start()
        except RuntimeError:  # the workers are closed, or the system has no thread left for us
            self.set_exception(EngineUnavailable("no worker can take the request"))
        except BaseException as error:
            self.set_exception(error)
        else:
            if isinstance(preparation, TokenSequence):
                self.set_result(preparation)
            else:
                self._current = preparation
                preparation.add_done_callback(self._end)

    def _end(self, done: Future[TokenSequence]) -> None:
        error = Interrupted() if done.cancelled() else done.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(done.result())


class _Once(Generic[Result]):
    """Work that is done by the first thread that wants its result. Others wait for it."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work: Callable[[], Result] | None = work
        self._lock = threading.Lock()
        self._result: list[Result] = []
        self._error: BaseException | None = None

    def get(self) -> Result:
        """Returns the result, or raises its error, once."""
        self.run()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result.pop()

    def run(self) -> None:
        """Does the work, unless that has been done. May be called from any thread."""
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                try:
                    self._result.append(work())
                except BaseException as error:
                    self._error = error


class Preprocessor:
    """A preprocessor of requests on a pool of threads."""

    def __init__(
        self,
        config: ModelConfig,
        skills: Mapping[str, Skill],
        tokenizer: Tokenizer,
        poison_requests: PoisonRequests,
        cropping: Cropping,
        make_crops: Callable[[Image.Image], Crops | DecodedImage],
        key_maker: PrefixKeyMaker | None = None,
        is_cached: Callable[[Digest | None, EmbeddingKey | None], bool] = lambda share_point, embedding_key: False,
        *,
        matchers: Matchers | None = None,
        keep_pixels: Callable[[SharedPixels], DecodedImage | None] | None = None,
        is_idle: Callable[[], bool] = lambda: False,
        on_thread: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        prefix_cache: bool = True,
        image_cache: bool = True,
        crop_cache: bool = False,
        max_context: int,
        max_image_pixels: int,
        num_threads: int,
        max_decoded_bytes: int = 2 * MAX_DECODING_BYTES,
        ageing_s: float = 10.0,
    ) -> None:
        """`make_crops` turns an RGB image into what the engine takes; all the threads call it. Without `key_maker`
        sequences use no cache of pages and embeddings; `prefix_cache`, `image_cache` and `crop_cache` say which
        caches they use. An image is not decoded where `is_cached` says that its pages or embeddings are; it gets
        the key of the image's end.
        Without `matchers` answers have no constraints. `keep_pixels` does what `make_crops` does for pixels in the
        memory of another process, or returns None if they must be copied first. Workers run within `on_thread`.

        `max_decoded_bytes` bounds the memory of all images together, from the start of their decoding until their
        crops are freed.
        """
        self._config = config
        self._positions_per_image = config.positions_per_image
        self._first_token = Token(config.bos_id)
        self._skills = skills
        self._tokenizer = tokenizer
        self._prompts = Prompts(config, skills, tokenizer)
        self._poison_requests = poison_requests
        self._max_context = max_context
        self._max_image_pixels = max_image_pixels
        self._cropping = cropping
        self._make_crops = make_crops
        self._keep_pixels = keep_pixels
        self._is_idle = is_idle
        self._key_maker = key_maker
        self._page_size = 1 if key_maker is None else key_maker.page_size
        self._is_cached = is_cached
        self._matchers = matchers
        self._prefix_cache = prefix_cache
        self._image_cache = image_cache
        self._crop_cache = crop_cache
        self._ids = itertools.count(1)
        self._random = random.Random(secrets.randbits(128))
        # By namespace and digest: headers of these images are not read again. Namespaces share no entries, since
        # the duration of a request reveals a hit.
        self._known_images: LruCache[tuple[str, bytes], ImageFacts] = LruCache(_MAX_KNOWN_IMAGES)
        self._budget = MemoryBudget(max_decoded_bytes)
        self._workers = Workers(
            num_threads, "kestrel-preprocess", self._budget, ageing_s=ageing_s, on_thread=on_thread
        )

    @property
    def decoded_bytes(self) -> int:
        """The memory of images that are being decoded, and of crops that are not freed yet, in bytes."""
        return self._budget.used_bytes

    def inspect(self, image: RequestImage) -> ImageHeader:
        """Read an image's header only. Raises `ImageError` if it is invalid or takes too much memory to decode."""
        header = inspect_image(image, max_image_pixels=self._max_image_pixels)
        self._budget.check_image(self._num_bytes(header))
        return header

    def submit(
        self,
        request: Request,
        clock: SequenceClock,
        tenant: str = "",
        namespace: str = "",
        adapter: AdapterLease | None = None,
        *,
        is_over: Callable[[], bool] = lambda: False,
        shared: SharedImages | None = None,
        fingerprint: str = "",
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> Future[TokenSequence] | TokenSequence:
        """Have the request prepared, usually by a worker; the future can be cancelled until a worker starts.

        Requests wait for a worker by tenant, priority and age, like sequences that wait for pages. Decoding stops
        soon after `is_over` returns True or a deadline passes. A request whose images are known and cached, and
        are small or stored, waits for no worker. Samples of one request have the same `shared`, and decode its
        images once. `fingerprint`: that of the request, if it is known. `call_soon` has another thread call a
        function; if the engine is idle, that thread makes the prompt while a worker decodes the image. Raises
        `ImageError` like `inspect`, and for images that take too much memory together, the errors of `prepare`, and
        RuntimeError if the workers are closed.
        """
        of_request = request, clock, tenant, namespace, adapter, is_over, shared, fingerprint, call_soon
        return self._submit(*of_request) if shared is None else shared.prepare(partial(self._submit, *of_request))

    def _submit(
        self,
        request: Request,
        clock: SequenceClock,
        tenant: str,
        namespace: str,
        adapter: AdapterLease | None,
        is_over: Callable[[], bool],
        shared: SharedImages | None,
        fingerprint: str,
        call_soon: Callable[[Callable[[], None]], object] | None,
    ) -> Future[TokenSequence] | TokenSequence:
        facts: list[ImageFacts] | None = None if shared is None else shared.facts
        if facts is None:
            facts, images = [], request.images
            # Requests with another policy compute their images anew, so preparing them here would be wasted.
            is_at_once = bool(images) and request.options.cache is CachePolicy.USE
            for image in images:
                digest = image_digest(image) if is_hashed_at_once(image) else None
                known = None if digest is None else self._known_images.get((namespace, digest))
                if known is None:
                    is_at_once = False
                    known = self._new_facts(image, digest, namespace, request, len(facts))
                facts.append(known)
            if len(facts) > 1 and self._may_fit(request):
                self._budget.check_images(_decoding_bytes(facts, images))
            # Long texts and constraints take a worker.
            if is_at_once and len(request.text) <= _MAX_TEXT_LENGTH_AT_ONCE and request.constraint is None:
                done = self._prepared_at_once(
                    request, images, clock, tenant, namespace, adapter, facts, fingerprint
                )
                if done is not None:
                    return done

        def check_wanted() -> None:
            expiry = clock.expiry(time.monotonic())
            if expiry is not None:
                raise expiry
            if self._workers.is_closing or is_over():
                raise Interrupted

        return self._workers.submit(
            Job(
                lambda: self.prepare(
                    request,
                    clock,
                    tenant,
                    namespace,
                    adapter,
                    check_wanted=check_wanted,
                    facts=facts,
                    shared=shared,
                    fingerprint=fingerprint,
                    call_soon=call_soon,
                ),
                submitted=clock.submitted,
                priority=request.options.priority,
                standing=request.options.standing,
                tenant=tenant,
                compiles=request.constraint is not None,
                num_bytes=self._num_bytes_of_job(request, facts, shared),
                then=_make_crops,
            )
        )

    def _may_fit(self, request: Request) -> bool:
        """Returns False if the images alone exceed the context: such a request is refused before any is decoded."""
        return len(request.images) * self._positions_per_image < self._max_context

    def _num_bytes_of_job(self, request: Request, facts: list[ImageFacts], shared: SharedImages | None) -> int:
        if not self._may_fit(request) or (shared is not None and shared.decoded):
            return 0
        return _decoding_bytes(facts, request.images)

    def prepare(
        self,
        request: Request,
        clock: SequenceClock,
        tenant: str = "",
        namespace: str = "",
        adapter: AdapterLease | None = None,
        *,
        check_wanted: Callable[[], None] = lambda: None,
        facts: list[ImageFacts] | None = None,
        shared: SharedImages | None = None,
        fingerprint: str = "",
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> TokenSequence:
        """Decode the images, compute their crops and tokenise the prompt; returns the sequence.

        `facts`: the known facts about the images. `shared` and `fingerprint`: as for `submit`. The sequence takes
        over the lease of the request's adapter.

        Raises `DeadlineExceeded` or `QueueTimeout` before any work is done; `RequestRefused`; `InvalidRequest`,
        usually as `ImageError` or `ContextLengthExceeded`; and the errors of `check_wanted`.
        """
        images = request.images
        prompt = _Once(
            lambda: self._without_pixels(
                request, images, clock, tenant, namespace, adapter, facts or [], fingerprint
            )
        )
        decoded: dict[bytes, DecodedPixels] = {} if shared is None else shared.decoded
        if (
            call_soon is not None
            and facts
            and shared is None
            and self._may_decode_first(request, facts[0], namespace)
        ):
            assert facts[0].digest is not None, "asked above"
            num_asked = itertools.count()

            def check_wanted_and_call() -> None:
                check_wanted()
                if next(num_asked) == 1:  # the header has been read, and the decoder releases the interpreter
                    with contextlib.suppress(RuntimeError):  # the event loop is closed
                        call_soon(prompt.run)

            try:
                decoded[facts[0].digest] = self._decoded(
                    request, 0, facts[0].digest, tenant, namespace, facts, check_wanted_and_call
                )
            except Exception:
                prompt.get()  # an error of the text comes first
                raise
        sequence, digests = prompt.get()
        if not digests:
            return sequence
        left_out = self._cached_images(sequence) if request.options.cache is CachePolicy.USE else []
        for place, (own, digest) in enumerate(zip(sequence.images, digests, strict=True)):
            if own in left_out and digest not in decoded:
                continue
            if digest not in decoded:
                decoded[digest] = self._decoded(request, place, digest, tenant, namespace, facts, check_wanted)
            own.pixels, own.size_px = decoded[digest]
        if shared is not None and decoded:
            facts = facts or [
                self._read_facts(image, digest) for image, digest in zip(images, digests, strict=True)
            ]
            for item, digest in zip(facts, digests, strict=True):
                item.digest = digest
            shared.facts = facts
        if any(own.pixels is None for own in sequence.images):
            facts = facts or [self._read_facts(image, None) for image in images]
            sequence.decode_job = partial(self._decode_job, images, digests, facts)
        clock.prepared = time.monotonic()
        return sequence

    def _may_decode_first(self, request: Request, facts: ImageFacts, namespace: str) -> bool:
        """Returns True if another thread may make the prompt while the only image is decoded.

        Only if the engine is idle: under load the other thread has other work. A quarantined request must not be
        decoded.
        """
        known = None if facts.digest is None else self._known_images.get((namespace, facts.digest))
        return (
            len(request.images) == 1
            and known is not None
            and known.size_px is None
            and not isinstance(request.images[0], RemoteImage)
            and len(request.text) <= _MAX_TEXT_LENGTH_AT_ONCE
            and request.constraint is None
            and not self._poison_requests.are_any
            and self._is_idle()
        )

    def _decoded(
        self,
        request: Request,
        place: int,
        digest: bytes,
        tenant: str,
        namespace: str,
        facts: list[ImageFacts] | None,
        check_wanted: Callable[[], None],
    ) -> DecodedPixels:
        """Returns the image at this place of a request decoded, whose size is known from now on."""
        image = request.images[place]
        try:
            decoded = self._decode(image, tenant, check_wanted, facts[place].header if facts else None)
        except ImageError as error:
            locate(error, request, place)
            raise
        if not request.options.is_transient:  # frames of cameras would displace all others
            found = facts[place] if facts else self._read_facts(image, digest)
            known = ImageFacts(digest, found.num_bytes, found.num_kept_bytes, decoded.size_px)
            self._known_images.put((namespace, digest), known)
        return decoded

    def _prepared_at_once(
        self,
        request: Request,
        images: tuple[RequestImage, ...],
        clock: SequenceClock,
        tenant: str,
        namespace: str,
        adapter: AdapterLease | None,
        facts: list[ImageFacts],
        fingerprint: str,
    ) -> TokenSequence | None:
        """Returns what a worker would return, or None if an image is not cached."""
        if self._workers.is_closing:
            raise RuntimeError("the workers are closed")
        try:
            sequence, digests = self._without_pixels(
                request, images, clock, tenant, namespace, adapter, facts, fingerprint
            )
        except KestrelError:
            raise
        except Exception:  # a bug of ours: the worker raises it again, into its future
            return None
        if len(self._cached_images(sequence)) < len(facts):
            return None
        sequence.decode_job = partial(self._decode_job, images, digests, facts)
        return sequence

    def _without_pixels(
        self,
        request: Request,
        images: tuple[RequestImage, ...],
        clock: SequenceClock,
        tenant: str,
        namespace: str,
        adapter: AdapterLease | None,
        facts: list[ImageFacts],
        fingerprint: str,
    ) -> tuple[TokenSequence, tuple[bytes, ...]]:
        """Returns the sequence and the digests of its images. Sets the sizes of images that were decoded before."""
        clock.preprocess_started = time.monotonic()
        expiry = clock.expiry(clock.preprocess_started)
        if expiry is not None:
            raise expiry
        digests: tuple[bytes, ...] = ()
        for number, image in enumerate(images):
            digest = facts[number].digest if facts else None
            digests += (image_digest(image) if digest is None else digest,)
        fingerprint = fingerprint or fingerprint_of(request, digests)
        if adapter is not None:
            fingerprint = f"{fingerprint}-{adapter.digest.hex()[:16]}"
        if fingerprint in self._poison_requests:
            raise RequestRefused(f"{fingerprint} has failed before")
        config, skill = self._config, self._skills[request.skill]
        sampling, options = request.sampling, request.options
        if sampling.logit_bias:
            sampling.check_vocabulary(config.vocab_size)
        prompt = self._prompts.of(request, namespace)
        tokens, image_size = [self._first_token, *prompt.tokens], self._positions_per_image
        num_positions = len(tokens) + len(digests) * image_size
        if num_positions >= self._max_context:
            counts = self._message_tokens(request)
            raise ContextLengthExceeded(skill.text_field, num_positions, self._max_context, counts)
        key_maker = None if options.cache is CachePolicy.BYPASS else self._key_maker
        own_images: list[SequenceImage] = []
        contents: list[ImageContent] = []
        for number, digest in enumerate(digests):
            start = 1 + prompt.image_places[number] + number * image_size
            contents.append(ImageContent(start, image_size, digest))
            known = facts[number] if facts else None
            if known is None or known.size_px is None:
                known = self._known_images.get((namespace, digest))
            own = SequenceImage(start, image_size, size_px=None if known is None else known.size_px)
            own_images.append(own)
            if key_maker is not None and self._image_cache:
                own.key = key_maker.embedding_key(digest, namespace)
            if key_maker is not None and self._crop_cache:
                own.crop_scope = CacheScope(namespace, frozenset((digest,)))
        answer_ends: tuple[int, ...] = ()
        for end in prompt.answer_ends:
            num_images_before = sum([place < end for place in prompt.image_places])
            answer_ends += (1 + end + num_images_before * image_size,)
        parser = skill.new_parser(request, self._tokenizer, config)
        embeddings = None
        if request.skill == Embed.skill:
            assert isinstance(parser, EmbeddingParser), "nothing is sampled"
            embeddings = parser.form
        keys = None
        if key_maker is not None and self._prefix_cache and embeddings is None:
            content = b"" if adapter is None else adapter.digest
            keys = key_maker.keys(tokens, tuple(contents), namespace, content, answer_ends=answer_ends)
        defaults, max_context = skill.defaults, self._max_context
        if parser.max_tokens is not None:
            max_context = min(max_context, num_positions + parser.max_tokens)
        matcher = end_check = None
        if request.constraint is not None:
            assert self._matchers is not None, "only engines without callers have none"
            max_tokens = max_context - num_positions
            matcher = self._matchers.new(request.constraint, parser, namespace, tenant, max_tokens)
            if matcher.check is not None:
                end_check = EndCheck(matcher.check, partial(self._have_checked, request, clock.submitted, tenant))
        clock.prepared = time.monotonic()
        own_request = SequenceRequest(
            parser,
            defaults.temperature if sampling.temperature is None else sampling.temperature,
            defaults.top_p if sampling.top_p is None else sampling.top_p,
            self._random.getrandbits(63) if sampling.seed is None else _signed(sampling.seed),
            max_context,
            sampling if sampling.controls_tokens else None,
            sampling.logprobs,
            matcher,
            end_check,
            fingerprint,
            options.priority,
            options.standing,
            tenant,
            options.cache is CachePolicy.REFRESH,
            options.is_transient,
            request.skill == Chat.skill,
            embeddings,
        )
        sequence = TokenSequence(
            next(self._ids),
            tokens,
            len(tokens),
            own_request,
            clock,
            own_images,
            answer_ends=answer_ends,
            cache=CacheState(keys),
            adapter=adapter,
        )
        return sequence, digests

    def _cached_images(self, sequence: TokenSequence) -> list[SequenceImage]:
        """Returns the images of a sequence that are cached, and need not be decoded."""
        keys, found = sequence.cache.keys, []
        for image in sequence.images:
            if image.size_px is None:
                continue  # decode the image to learn its size
            end = image.start + image.num_positions
            share_point = None if keys is None else keys.share_point(end, self._page_size)
            if self._is_cached(share_point, image.key):
                found.append(image)
        return found

    def _decode_job(
        self,
        images: tuple[RequestImage, ...],
        digests: tuple[bytes, ...],
        facts: list[ImageFacts],
        sequence: TokenSequence,
    ) -> Job[list[Crops | DecodedImage]]:
        """Returns the job that decodes all images of a sequence of which one is evicted before it starts."""
        request = sequence.request
        return Job(
            partial(self._pixels_of, images, digests, request.tenant),
            submitted=sequence.clock.submitted,
            priority=request.priority,
            standing=request.standing,
            tenant=request.tenant,
            num_bytes=_decoding_bytes(facts, images),
        )

    def _new_facts(
        self, image: RequestImage, digest: bytes | None, namespace: str, request: Request, place: int
    ) -> ImageFacts:
        """Returns the facts in the header of a request's image at this place. Raises `ImageError`."""
        try:
            facts = self._read_facts(image, digest)
        except ImageError as error:
            locate(error, request, place)
            raise
        if digest is not None and not request.options.is_transient:
            self._known_images.put((namespace, digest), facts)
        return facts

    def _message_tokens(self, request: Request) -> list[int]:
        """Returns the positions of each message of a conversation; none for other requests."""
        if not isinstance(request, Chat):
            return []
        counts = self._skills[request.skill].message_tokens(request, self._tokenizer, self._config)
        return [
            count + len(message.images) * self._positions_per_image
            for count, message in zip(counts, request.messages, strict=True)
        ]

    def _read_facts(self, image: RequestImage, digest: bytes | None) -> ImageFacts:
        header = self.inspect(image)
        num_kept_bytes = kept_bytes(header.height, header.width, self._cropping)
        of_file = None if isinstance(image, RemoteImage) else header
        return ImageFacts(digest, self._num_bytes(header), num_kept_bytes, None, of_file)

    def decode_again(self, sequence: TokenSequence) -> Future[list[Crops | DecodedImage]]:
        """Have a worker decode all images of a sequence that was prepared without the pixels of some.

        The future fails with `EngineUnavailable` if the workers are closed.
        """
        try:
            return self._workers.submit(sequence.decode_job(sequence))
        except RuntimeError:
            refused: Future[list[Crops | DecodedImage]] = Future()
            refused.set_exception(EngineUnavailable("no worker can decode the images"))
            return refused

    def _have_checked(self, request: Request, submitted: float, tenant: str, work: Callable[[], None]) -> None:
        options = request.options
        job = Job(work, submitted=submitted, priority=options.priority, standing=options.standing, tenant=tenant)
        self._workers.submit(job)

    def close(self) -> None:
        """Drop requests that have not started, and wait for the workers for a bounded time."""
        self._workers.close()

    def _pixels_of(
        self, images: tuple[RequestImage, ...], digests: tuple[bytes, ...], tenant: str
    ) -> list[Crops | DecodedImage]:
        distinct = dict(zip(digests, images, strict=True))
        decoded = {digest: self._decode(image, tenant).pixels for digest, image in distinct.items()}
        return [decoded[digest] for digest in digests]

    def _decode(
        self,
        image: RequestImage,
        tenant: str,
        check_wanted: Callable[[], None] = lambda: None,
        header: ImageHeader | None = None,
    ) -> DecodedPixels:
        """Returns an image decoded. `header`: its header, if that has been read."""
        crops: Crops | DecodedImage | None = None
        if isinstance(image, RemoteImage):
            fetched = image.fetch(check_wanted)
            size_px = fetched.width_px, fetched.height_px
            if self._keep_pixels is not None:
                crops = self._keep_pixels(fetched)
            if crops is None:
                crops = self._make_crops(image_of(fetched))
        else:
            decoded = decode_image(
                image, max_image_pixels=self._max_image_pixels, check_wanted=check_wanted, header=header
            )
            size_px, crops = decoded.size, self._make_crops(decoded)
        self._budget.hold(tenant, crops, crops.pixels.nbytes)
        return DecodedPixels(crops, size_px)

    def _num_bytes(self, header: ImageHeader) -> int:
        """Returns the most memory that decoding an image and computing its crops takes, in bytes."""
        return header.decoding_bytes + _CROP_COPIES * crops_bytes(header.height, header.width, self._cropping)


def _make_crops(sequence: TokenSequence) -> None:
    """Makes the crops of a sequence that an idle engine got before they were made."""
    for image in sequence.images:
        if isinstance(image.pixels, DecodedImage):
            image.pixels.prefetch()


def _decoding_bytes(facts: Sequence[ImageFacts], images: Sequence[RequestImage]) -> int:
    """Returns the most memory that decoding images one after the other takes, while those before are kept.

    Equal images are decoded once.
    """
    if len(facts) == 1:
        return max(facts[0].num_bytes, facts[0].num_kept_bytes)
    kept, most, seen, not_hashed = 0, 0, set[bytes](), list[RequestImage]()
    for item, image in zip(facts, images, strict=True):
        if item.digest in seen or any(len(other) == len(image) and other == image for other in not_hashed):
            continue
        if item.digest is not None:
            seen.add(item.digest)
        else:
            not_hashed.append(image)
        kept += item.num_kept_bytes
        most = max(most, item.num_bytes - item.num_kept_bytes)
    return kept + most


def _signed(seed: int) -> int:
    """Returns the 64 bits of a seed as a signed number, as in tensors."""
    return seed - 2**64 if seed >= 2**63 else seed
