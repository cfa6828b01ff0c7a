"""Preparing requests on worker threads."""

import io
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import pytest
from PIL import Image

from kestrel_runtime.api import images
from kestrel_runtime.api.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    ImageError,
    KestrelError,
    QueueTimeout,
    RequestRefused,
)
from kestrel_runtime.api.images import HashedImage, image_digest, is_hashed_at_once
from kestrel_runtime.api.requests import (
    CachePolicy,
    Caption,
    Chat,
    ChatMessage,
    Detect,
    Priority,
    Query,
    RequestOptions,
    Role,
    SamplingParams,
)
from kestrel_runtime.engine import preprocessing
from kestrel_runtime.engine.poison_requests import PoisonRequests, fingerprint_of
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.engine.workers import Interrupted
from kestrel_runtime.imaging.crops import DecodedImage, keep_decoded
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.cache_keys import PrefixKeyMaker
from kestrel_runtime.scheduling.sequence import SequenceClock, TokenSequence
from tests import hostile_images
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.preprocessors import new_preprocessor


def plain(width_px: int, height_px: int, colour: int) -> bytes:
    """An image of one colour."""
    file = io.BytesIO()
    Image.new("L", (width_px, height_px), colour).save(file, "PNG")
    return file.getvalue()


IMAGE = (MD3_SMALL / "image_0_500x400.png").read_bytes()
OTHER = plain(37, 41, 7)
MAX_WAIT_S = 30


@pytest.fixture
def preprocessor(loaded: LoadedModel):
    preprocessor = new_preprocessor(loaded, num_threads=2)
    yield preprocessor
    preprocessor.close()


def clock() -> SequenceClock:
    return SequenceClock(submitted=time.monotonic())


def submit(preprocessor: Preprocessor, *arguments: Any, **options: Any) -> Future[TokenSequence]:
    """Have a worker prepare a request."""
    future = preprocessor.submit(*arguments, **options)
    assert isinstance(future, Future)
    return future


def test_images_may_be_kept_decoded_and_divided_into_crops_later(loaded: LoadedModel) -> None:
    preprocessor = new_preprocessor(loaded, keeps_decoded=True)
    sequence = preprocessor.prepare(Caption(IMAGE), clock())
    preprocessor.close()
    (image,) = sequence.images
    assert isinstance(image.pixels, DecodedImage)
    assert image.pixels.pixels.shape[:2] == (400, 500)
    assert len(image.crops_left()) == 9


def test_a_question_without_an_image_has_no_prefix(preprocessor: Preprocessor) -> None:
    sequence = preprocessor.prepare(Query("hello"), clock())
    assert (sequence.num_image_positions, sequence.spans, sequence.images) == (0, (), [])


def test_open_settings_take_the_skills_defaults_and_zero_is_not_open(preprocessor: Preprocessor) -> None:
    text = preprocessor.prepare(Query("hello"), clock())
    place = preprocessor.prepare(Detect("cat", IMAGE), clock())
    greedy = preprocessor.prepare(Query("hello", sampling=SamplingParams(temperature=0.0, top_p=0.5)), clock())
    assert (text.request.temperature, text.request.top_p) == (0.2, 0.9)
    assert (place.request.temperature, place.request.top_p) == (0.0, 1.0)
    assert (greedy.request.temperature, greedy.request.top_p) == (0.0, 0.5)


def test_a_sequence_ends_where_its_parser_takes_no_further_token_or_its_context_is_full(
    preprocessor: Preprocessor,
) -> None:
    short, long = (
        preprocessor.prepare(Query("hello", sampling=SamplingParams(max_tokens=limit)), clock())
        for limit in (3, 4096)
    )
    assert short.request.max_context == short.num_prompt_positions + 3
    assert long.request.max_context == 1000


def test_a_seed_is_that_of_the_request_or_drawn(preprocessor: Preprocessor) -> None:
    sampling = SamplingParams(seed=3)
    first, second = (preprocessor.prepare(Query("hello", sampling=sampling), clock()) for _ in range(2))
    assert first.request.seed == second.request.seed == 3
    assert first.id != second.id
    largest = preprocessor.prepare(Query("hello", sampling=SamplingParams(seed=2**64 - 1)), clock())
    assert largest.request.seed == -1, "its bits, as tensors have them"
    unseeded = [preprocessor.prepare(Query("hello"), clock()).request.seed for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_a_prompt_that_leaves_no_room_is_refused_before_its_image_is_decoded(preprocessor: Preprocessor) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        preprocessor.prepare(Query("word " * 400, b"not an image"), clock())
    assert caught.value.max_context_tokens == 1000


def test_an_image_over_the_pixel_limit_is_refused(loaded: LoadedModel) -> None:
    strict = new_preprocessor(loaded, max_context=4096, max_image_pixels=1000)
    with pytest.raises(ImageError) as caught:
        strict.prepare(Caption(IMAGE), clock())
    assert caught.value.too_large
    strict.close()


def test_a_workers_error_is_in_its_future(preprocessor: Preprocessor) -> None:
    assert isinstance(submit(preprocessor, Caption(IMAGE[:2000]), clock()).exception(), ImageError)
    assert submit(preprocessor, Query("hello"), clock()).result().num_prompt_tokens > 4


def test_what_the_header_tells_is_refused_at_once(preprocessor: Preprocessor) -> None:
    with pytest.raises(ImageError):
        submit(preprocessor, Caption(b"not an image"), clock())


@pytest.mark.parametrize(("late", "error"), [("deadline", DeadlineExceeded), ("queue_deadline", QueueTimeout)])
def test_an_image_of_an_expired_request_is_not_decoded(
    preprocessor: Preprocessor, late: str, error: type[KestrelError]
) -> None:
    now = time.monotonic()
    with pytest.raises(error):  # and not an ImageError
        preprocessor.prepare(Caption(b"not an image"), SequenceClock(now - 1, **{late: now}))


def test_a_quarantined_request_is_refused_before_its_image_is_decoded(loaded: LoadedModel) -> None:
    poison_requests = PoisonRequests()
    preprocessor = new_preprocessor(loaded, poison_requests, max_image_pixels=1)
    poison_requests.quarantine(fingerprint_of(Caption(b"not an image")))
    with pytest.raises(RequestRefused):
        preprocessor.prepare(Caption(b"not an image"), clock())
    with pytest.raises(ImageError):
        preprocessor.prepare(Caption(b"not that image"), clock())
    preprocessor.close()


def test_a_sequence_knows_its_tenant_and_priority(preprocessor: Preprocessor) -> None:
    query = Query("hello", options=RequestOptions(priority=Priority.BATCH))
    sequence = submit(preprocessor, query, clock(), "somebody").result()
    assert (sequence.tenant, sequence.priority) == ("somebody", Priority.BATCH)


class OneWorker:
    """A preprocessor with one thread, which notes the widths of images in the order in which it takes them."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.widths: list[int] = []
        self._has_begun, self._may_go_on = threading.Event(), threading.Event()
        self._cropping = loaded.family.cropping(loaded.model.config)
        self.preprocessor = new_preprocessor(loaded, make_crops=self._make_crops, ageing_s=10.0)

    def after(self, *waiting: tuple[Priority, float], tenants: str = "") -> list[int]:
        """The order in which requests of these priorities and ages in seconds are taken, by their places here.

        A letter of `tenants` names the tenant of each; "" is that of all.
        """
        now = time.monotonic()
        first = submit(self.preprocessor, Caption(picture(100)), SequenceClock(now))
        assert self._has_begun.wait(MAX_WAIT_S)
        futures = [
            submit(
                self.preprocessor,
                Caption(picture(width), options=RequestOptions(priority=priority)),
                SequenceClock(now - age_s),
                tenants[width - 1 : width],
            )
            for width, (priority, age_s) in enumerate(waiting, start=1)
        ]
        self._may_go_on.set()
        for future in (first, *futures):
            future.result(MAX_WAIT_S)
        self.preprocessor.close()
        return [width - 1 for width in self.widths[1:]]

    def _make_crops(self, image):
        self.widths.append(image.width)
        self._has_begun.set()
        assert self._may_go_on.wait(MAX_WAIT_S)
        return keep_decoded(image, self._cropping)


def picture(width_px: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width_px, 8)).save(file, "PNG")
    return file.getvalue()


def test_workers_take_the_most_urgent_first(loaded: LoadedModel) -> None:
    waiting = [(Priority.BATCH, 0.0), (Priority.NORMAL, 0.0), (Priority.INTERACTIVE, 0.0), (Priority.NORMAL, 1.0)]
    assert OneWorker(loaded).after(*waiting) == [2, 3, 1, 0]


def test_who_has_waited_long_enough_is_no_less_urgent(loaded: LoadedModel) -> None:
    waiting = [(Priority.INTERACTIVE, 0.0), (Priority.BATCH, 19.0), (Priority.BATCH, 21.0)]
    assert OneWorker(loaded).after(*waiting) == [2, 0, 1]


def test_tenants_take_turns_however_old_the_backlog_of_one_is(loaded: LoadedModel) -> None:
    waiting = [(Priority.NORMAL, 60.0)] * 8 + [(Priority.NORMAL, 0.0)] * 2
    order = OneWorker(loaded).after(*waiting, tenants="a" * 8 + "bb")
    assert {8, 9} <= set(order[:4])


# Memory


def bounded(loaded: LoadedModel, max_decoded_bytes: int, num_threads: int = 2) -> Preprocessor:
    return new_preprocessor(
        loaded,
        keeps_decoded=True,
        max_image_pixels=64_000_000,
        num_threads=num_threads,
        max_decoded_bytes=max_decoded_bytes,
    )


def test_what_an_image_takes_is_counted_until_its_pixels_are_freed(loaded: LoadedModel) -> None:
    preprocessor = bounded(loaded, 2**30)
    sequence = submit(preprocessor, Caption(IMAGE), clock()).result(MAX_WAIT_S)
    assert preprocessor.decoded_bytes == 4 * 500 * 400
    assert submit(preprocessor, Query("hello"), clock()).result(MAX_WAIT_S)
    assert preprocessor.decoded_bytes == 4 * 500 * 400
    del sequence
    assert preprocessor.decoded_bytes == 0
    preprocessor.close()


@pytest.mark.parametrize("tenant", ["", "somebody"])
def test_files_that_are_small_wait_encoded_where_their_pixels_would_take_too_much(
    loaded: LoadedModel, tenant: str
) -> None:
    limit_bytes, file = 64 * 2**20, hostile_images.png(1600, 1000, colour_type=2)
    assert len(file) < 10_000
    preprocessor = bounded(loaded, limit_bytes)  # 256 of them would take 1.6 GB
    futures = [submit(preprocessor, Caption(file), clock(), tenant) for _ in range(40)]
    most_bytes, num_prepared = 0, 0
    while futures:
        done, _ = wait(futures, MAX_WAIT_S, FIRST_COMPLETED)
        assert done
        most_bytes = max(most_bytes, preprocessor.decoded_bytes)
        prepared = [future.result() for future in done]
        num_prepared += len(prepared)
        futures = [future for future in futures if future not in done]
        del done, prepared
    preprocessor.close()
    assert num_prepared == 40
    assert most_bytes <= limit_bytes
    assert preprocessor.decoded_bytes == 0


def test_so_many_wait_decoded_and_no_more_are_decoded_until_they_go_on(loaded: LoadedModel) -> None:
    file, kept_bytes, limit_bytes = hostile_images.png(1000, 800, colour_type=2), 4 * 800_000, 48 * 2**20
    preprocessor = bounded(loaded, limit_bytes, num_threads=1)
    futures = [submit(preprocessor, Caption(file), clock()) for _ in range(30)]
    # A request behind them that needs no memory runs when no other can.
    last = submit(preprocessor, Query("hi", options=RequestOptions(priority=Priority.BATCH)), clock())
    last.result(MAX_WAIT_S)
    num_decoded = sum(future.done() for future in futures)
    assert 5 <= num_decoded <= limit_bytes / kept_bytes
    assert preprocessor.decoded_bytes == num_decoded * kept_bytes
    while futures:
        futures.pop(0).result(MAX_WAIT_S)
    preprocessor.close()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("PNG with transparency", hostile_images.png(2, 2)[:16] + struct.pack(">II", 8000, 8000) + bytes(30)),
        ("WebP", hostile_images.webp_canvas(8000, 8000)),
        ("progressive JPEG", hostile_images.progressive_jpeg(8000, 8000, 1)),
        (
            "TIFF in one strip",
            hostile_images.tiff(8000, 8000, {273: (4, 1, 0), 274: (3, 1, 6), 278: (4, 1, 8000), 279: (4, 1, 9)}),
        ),
    ],
)
def test_an_image_that_takes_too_much_to_decode_is_refused_before_it_is(
    loaded: LoadedModel, name: str, file: bytes
) -> None:
    preprocessor = bounded(loaded, 600 * 2**20)
    with pytest.raises(ImageError, match="must take at most 450 MiB while it is decoded") as caught:
        submit(preprocessor, Caption(file), clock())
    assert caught.value.too_large, name
    preprocessor.close()


def test_the_largest_image_in_the_simplest_format_is_not_refused(loaded: LoadedModel) -> None:
    preprocessor = bounded(loaded, 2**30)
    for kind in (2, 6):
        header = hostile_images.png(2, 2, colour_type=kind)[:16] + struct.pack(">II", 8000, 8000) + bytes(30)
        assert preprocessor.inspect(header) is not None
    preprocessor.close()


# Giving up


@pytest.mark.parametrize("reason", ["caller left", "deadline", "closing"])
def test_decoding_stops_between_two_scans_when_its_request_is_cancelled(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    preprocessor = bounded(loaded, 2**30, num_threads=1)
    timing, is_over, num_checks = clock(), False, 0
    closer, is_closing = threading.Thread(target=preprocessor.close), threading.Event()
    decode_image = preprocessing.decode_image

    def decode(*arguments: Any, check_wanted: Any, **options: Any) -> Any:
        def check() -> None:
            nonlocal is_over, num_checks
            num_checks += 1
            if num_checks == 30:  # the header takes about 20
                match reason:
                    case "caller left":
                        is_over = True
                    case "deadline":
                        timing.deadline = time.monotonic()
                    case _:
                        waiting = submit(preprocessor, Query("hello"), clock())
                        waiting.add_done_callback(lambda _: is_closing.set())
                        closer.start()
                        assert is_closing.wait(MAX_WAIT_S)
            check_wanted()

        return decode_image(*arguments, check_wanted=check, **options)

    monkeypatch.setattr(preprocessing, "decode_image", decode)
    file = hostile_images.progressive_jpeg(640, 480, 60)
    error = submit(preprocessor, Caption(file), timing, is_over=lambda: is_over).exception(MAX_WAIT_S)
    assert isinstance(error, DeadlineExceeded if reason == "deadline" else Interrupted)
    assert num_checks == 30
    preprocessor.close()


def known_image_preprocessor(loaded: LoadedModel, **settings: Any) -> tuple[Preprocessor, set[bytes]]:
    """One with keys, for which the images in the set are cached; it has prepared a question about `IMAGE` in
    namespace "a"."""
    cached: set[bytes] = set()
    preprocessor = new_preprocessor(
        loaded,
        key_maker=PrefixKeyMaker({"model": "m"}, 16),
        is_cached=lambda _, embedding_key: (
            embedding_key is not None and not cached.isdisjoint(embedding_key.scope.images)
        ),
        **settings,
    )
    submit(preprocessor, Query("Who?", IMAGE), clock(), namespace="a").result(MAX_WAIT_S)
    return preprocessor, cached


def test_a_known_and_cached_image_is_neither_opened_nor_handed_to_a_worker(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor, cached = known_image_preprocessor(loaded)
    cached.add(image_digest(IMAGE))
    expected = preprocessor.prepare(Query("Where?", IMAGE), clock(), "t", "a")
    monkeypatch.setattr(preprocessing, "inspect_image", None)
    monkeypatch.setattr(preprocessor, "_workers", FakeWorkers())
    found = preprocessor.submit(Query("Where?", IMAGE), clock(), "t", "a")
    assert isinstance(found, TokenSequence)
    assert found.images[0].pixels is None
    assert (found.tokens, found.cache.keys, found.tenant, found.request.fingerprint) == (
        expected.tokens,
        expected.cache.keys,
        expected.tenant,
        expected.request.fingerprint,
    )
    assert found.decode_job(found).num_bytes == expected.decode_job(expected).num_bytes > 0
    assert found.clock.preprocess_started is not None
    assert found.clock.prepared is not None


def test_of_large_images_those_that_bring_their_digest_are_prepared_at_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor, cached = known_image_preprocessor(loaded)
    monkeypatch.setattr(images, "_MAX_BYTES_HASHED_AT_ONCE", 0)
    monkeypatch.setattr(preprocessor, "_workers", FakeWorkers())
    cached.add(image_digest(IMAGE))
    request = Query("Where?", HashedImage(IMAGE, image_digest(IMAGE)))
    assert isinstance(preprocessor.submit(request, clock(), namespace="a"), TokenSequence)
    with pytest.raises(AssertionError, match="a worker was asked"):
        submit(preprocessor, Query("Where?", IMAGE), clock(), namespace="a")


@pytest.mark.parametrize(
    "request_",
    [
        Query("Where?", IMAGE, options=RequestOptions(cache=CachePolicy.REFRESH)),
        Query("Where?", IMAGE, options=RequestOptions(cache=CachePolicy.BYPASS)),
        Query("Where? " * 100, IMAGE),
    ],
    ids=["refreshes", "bypasses", "long text"],
)
def test_workers_do_what_takes_long_also_for_a_known_image(loaded: LoadedModel, request_: Query) -> None:
    preprocessor, cached = known_image_preprocessor(loaded)
    cached.add(image_digest(IMAGE))
    preprocessor.close()
    with pytest.raises(RuntimeError):
        submit(preprocessor, request_, clock(), namespace="a")


def test_an_image_that_is_known_and_not_cached_any_more_is_decoded(loaded: LoadedModel) -> None:
    preprocessor, _ = known_image_preprocessor(loaded)
    sequence = submit(preprocessor, Query("Where?", IMAGE), clock(), namespace="a").result(MAX_WAIT_S)
    preprocessor.close()
    assert sequence.images[0].pixels is not None
    assert sequence.decode_job is None, "it would hold the encoded image"


def test_another_namespace_learns_nothing_from_an_image_that_is_known(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor, _ = known_image_preprocessor(loaded)
    opened: list[bytes] = []
    inspect = preprocessing.inspect_image
    monkeypatch.setattr(
        preprocessing, "inspect_image", lambda image, **limits: opened.append(image) or inspect(image, **limits)
    )
    for namespace, num_opened in (("a", 0), ("b", 1), ("b", 1)):
        submit(preprocessor, Query("Where?", IMAGE), clock(), namespace=namespace).result(MAX_WAIT_S)
        assert len(opened) == num_opened
    preprocessor.close()


def test_what_a_worker_would_refuse_is_refused_at_once_too(loaded: LoadedModel) -> None:
    poison_requests = PoisonRequests()
    preprocessor, cached = known_image_preprocessor(loaded, poison_requests=poison_requests)
    cached.add(image_digest(IMAGE))
    request = Query("Where?", IMAGE)
    late = SequenceClock(submitted=0.0, deadline=1.0)
    with pytest.raises(DeadlineExceeded):
        submit(preprocessor, request, late, namespace="a").result(0)
    poison_requests.quarantine(fingerprint_of(request))
    with pytest.raises(RequestRefused):
        submit(preprocessor, request, clock(), namespace="a").result(0)
    preprocessor.close()
    with pytest.raises(RuntimeError):
        submit(preprocessor, Query("Who?", IMAGE), clock(), namespace="a")


def about(*images: bytes) -> Chat:
    """A conversation with an image in each of its questions, and an answer behind each but the last."""
    turns: list[ChatMessage] = []
    for image in images:
        turns += [ChatMessage(Role.USER, "Where?", (image,)), ChatMessage(Role.ASSISTANT, "There.")]
    return Chat(tuple(turns[:-1]))


def test_images_have_their_places_between_the_words_and_equal_ones_are_decoded_once(loaded: LoadedModel) -> None:
    preprocessor = new_preprocessor(loaded, max_context=4000)
    sequence = submit(preprocessor, about(IMAGE, OTHER, IMAGE), clock()).result(MAX_WAIT_S)
    preprocessor.close()
    first, second, third = sequence.images
    num_words = len(loaded.tokenizer.encode("Where?")) + len(loaded.tokenizer.encode("There."))
    size = first.num_positions
    assert [image.start for image in sequence.images] == [1, 1 + size + num_words, 1 + 2 * (size + num_words)]
    assert sequence.answer_ends == (second.start, third.start)
    assert sequence.request.is_turn
    assert sequence.share_points == (first.end, second.start, second.end, third.start, third.end)
    assert sequence.length == len(sequence.tokens) + 3 * size
    assert (first.size_px, second.size_px) == ((500, 400), (37, 41))
    assert first.pixels is third.pixels is not None
    assert second.pixels is not first.pixels


def test_of_several_images_only_those_that_are_not_cached_are_decoded(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor, cached = known_image_preprocessor(loaded, max_context=4000)
    cached.add(image_digest(IMAGE))
    sequence = submit(preprocessor, about(IMAGE, OTHER), clock(), namespace="a").result(MAX_WAIT_S)
    known, new = sequence.images
    assert (known.pixels, known.size_px) == (None, (500, 400))
    assert new.pixels is not None
    alone = submit(preprocessor, about(OTHER), clock(), namespace="a").result(MAX_WAIT_S)
    assert alone.decode_job is None
    again = preprocessor.decode_again(sequence).result(MAX_WAIT_S)
    assert len(again) == 2, "all, since the others may be evicted as well"
    cached.add(image_digest(OTHER))
    monkeypatch.setattr(preprocessor, "_workers", FakeWorkers())
    assert isinstance(preprocessor.submit(about(OTHER, IMAGE), clock(), namespace="a"), TokenSequence)


def test_images_that_take_too_much_memory_together_are_refused_with_both_numbers(loaded: LoadedModel) -> None:
    preprocessor = new_preprocessor(loaded, max_context=8000, max_decoded_bytes=16 * 2**20)
    large = [plain(1000, 900, colour) for colour in range(8)]
    with pytest.raises(ImageError, match=r"at most 12 MiB together while they are decoded, and take \d\d MiB"):
        submit(preprocessor, about(*large), clock())
    assert submit(preprocessor, about(*large[:1] * 8), clock()).result(MAX_WAIT_S), "equal ones are decoded once"
    preprocessor.close()


def test_equal_images_count_once_also_before_they_are_hashed(loaded: LoadedModel) -> None:
    preprocessor = new_preprocessor(loaded, max_context=8000, max_decoded_bytes=16 * 2**20)
    copies = [
        bytes(bytearray(plain(1000, 900, 7)) + bytes(2**18)) for _ in range(8)
    ]  # what follows a PNG is not read
    assert not is_hashed_at_once(copies[0])
    assert submit(preprocessor, about(*copies), clock()).result(MAX_WAIT_S)
    preprocessor.close()


def test_images_that_exceed_the_context_are_refused_for_that_whatever_memory_they_take(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = loaded.model.config.positions_per_image
    preprocessor = new_preprocessor(loaded, max_context=8 * size, max_decoded_bytes=16 * 2**20)
    monkeypatch.setattr(preprocessor, "_decode", lambda *arguments: pytest.fail("an image was decoded"))
    monkeypatch.setattr(preprocessor, "_message_tokens", lambda request: [])  # the family has no conversations
    large = [plain(1000, 900, colour) for colour in range(8)]
    for shown in (large, large[:1] * 8):
        with pytest.raises(ContextLengthExceeded) as caught:
            submit(preprocessor, about(*shown), clock()).result(MAX_WAIT_S)
        assert caught.value.num_prompt_tokens > 8 * size
    preprocessor.close()


class FakeWorkers:
    """Workers that are given nothing."""

    is_closing = False

    def submit(self, job: Any) -> Any:
        raise AssertionError("a worker was asked")


@pytest.mark.parametrize("is_called", [True, False])
def test_another_thread_may_make_the_prompt_while_the_image_is_decoded(
    loaded: LoadedModel, is_called: bool
) -> None:
    preprocessor = new_preprocessor(loaded, is_idle=lambda: True)
    asked: list[Callable[[], None]] = []

    def call_soon(make: Callable[[], None]) -> None:
        asked.append(make)
        if is_called:
            make()

    file = hostile_images.progressive_jpeg(64, 48, 9)  # it takes several reads
    query = Query("hello", file, sampling=SamplingParams(seed=1))
    sequence = submit(preprocessor, query, clock(), call_soon=call_soon).result()
    expected = preprocessor.prepare(query, clock())
    preprocessor.close()
    assert len(asked) == 1
    asked[0]()  # too late, and without effect
    assert (sequence.tokens, sequence.spans, sequence.cache) == (expected.tokens, expected.spans, expected.cache)
    assert sequence.images[0].size_px == expected.images[0].size_px
    assert sequence.images[0].pixels is not None


def test_an_error_of_the_text_comes_before_that_of_an_image_that_was_decoded_first(loaded: LoadedModel) -> None:
    fitting = 2 + loaded.model.config.positions_per_image
    preprocessor = new_preprocessor(loaded, is_idle=lambda: True, max_context=fitting)
    damaged = IMAGE[: len(IMAGE) // 2]
    with pytest.raises(ContextLengthExceeded):
        submit(preprocessor, Query("hello", damaged), clock(), call_soon=lambda make: None).result()
    preprocessor.close()


def test_while_requests_are_quarantined_none_is_decoded_first(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_requests = PoisonRequests()
    preprocessor = new_preprocessor(loaded, poison_requests, is_idle=lambda: True)
    poison_requests.quarantine(fingerprint_of(Caption(IMAGE)))
    monkeypatch.setattr("kestrel_runtime.engine.preprocessing.decode_image", None)
    with pytest.raises(RequestRefused):
        submit(preprocessor, Caption(IMAGE), clock(), call_soon=lambda make: None).result()
    preprocessor.close()
