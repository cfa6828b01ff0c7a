"""Preparing requests on worker threads."""

import io
import threading
import time

import pytest
from PIL import Image

from kestrel_runtime.culprits import Culprits, fingerprint_of
from kestrel_runtime.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    ImageError,
    KestrelError,
    QueueTimeout,
    RequestRefused,
)
from kestrel_runtime.images import UncutImage, leave_uncut
from kestrel_runtime.loading import LoadedModel
from kestrel_runtime.preprocess import Preprocessor
from kestrel_runtime.requests import Caption, Point, Priority, Query, RequestOptions, SamplingParams
from kestrel_runtime.sequence import SequenceClock
from tests.golden import MD3_SMALL

IMAGE = (MD3_SMALL / "image_0_500x400.png").read_bytes()
MAX_WAIT_S = 30


@pytest.fixture
def preprocessor(moondream3: LoadedModel):
    preprocessor = Preprocessor(
        moondream3.model.config,
        moondream3.tokenizer,
        Culprits(),
        max_context=1000,
        max_image_pixels=10**6,
        num_threads=2,
    )
    yield preprocessor
    preprocessor.close()


def clock() -> SequenceClock:
    return SequenceClock(submitted=time.monotonic())


def test_a_prompt_is_bos_then_image_then_the_skills_tokens(preprocessor: Preprocessor) -> None:
    sequence = preprocessor.prepare(Caption(IMAGE, "short"), clock())
    assert [token.id for token in sequence.tokens] == [0, 1, 287, 80, 2, 550, 277, 3]
    assert sequence.num_image_tokens == 729
    assert sequence.length == sequence.num_prompt_positions == 8 + 729
    assert sequence.prefix_length == 730
    assert sequence.crops is not None
    assert sequence.num_crops_to_encode == 9


def test_images_may_be_left_uncut_for_who_encodes_them(moondream3: LoadedModel) -> None:
    preprocessor = Preprocessor(
        moondream3.model.config,
        moondream3.tokenizer,
        Culprits(),
        max_context=1000,
        max_image_pixels=10**6,
        num_threads=1,
        cut=leave_uncut,
    )
    sequence = preprocessor.prepare(Caption(IMAGE), clock())
    preprocessor.close()
    assert isinstance(sequence.crops, UncutImage)
    assert sequence.crops.pixels.shape[:2] == (400, 500)
    assert sequence.num_crops_to_encode == 9


def test_a_question_without_an_image_has_no_prefix(preprocessor: Preprocessor) -> None:
    sequence = preprocessor.prepare(Query("hello"), clock())
    assert (sequence.num_image_tokens, sequence.prefix_length, sequence.crops) == (0, 0, None)


def test_open_settings_take_the_skills_defaults_and_zero_is_not_open(preprocessor: Preprocessor) -> None:
    text = preprocessor.prepare(Query("hello"), clock())
    place = preprocessor.prepare(Point("cat", IMAGE), clock())
    greedy = preprocessor.prepare(Query("hello", sampling=SamplingParams(temperature=0.0, top_p=0.5)), clock())
    assert (text.temperature, text.top_p) == (0.2, 0.9)
    assert (place.temperature, place.top_p) == (0.0, 1.0)
    assert (greedy.temperature, greedy.top_p) == (0.0, 0.5)


def test_equal_seeds_draw_equal_numbers(preprocessor: Preprocessor) -> None:
    sampling = SamplingParams(seed=3)
    first, second = (preprocessor.prepare(Query("hello", sampling=sampling), clock()) for _ in range(2))
    assert [first.random.random() for _ in range(3)] == [second.random.random() for _ in range(3)]
    assert first.id != second.id


def test_a_prompt_that_leaves_no_room_is_refused_before_its_image_is_decoded(preprocessor: Preprocessor) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        preprocessor.prepare(Query("word " * 400, b"not an image"), clock())
    assert caught.value.max_context_tokens == 1000


def test_an_image_over_the_pixel_limit_is_refused(moondream3: LoadedModel) -> None:
    strict = Preprocessor(
        moondream3.model.config,
        moondream3.tokenizer,
        Culprits(),
        max_context=4096,
        max_image_pixels=1000,
        num_threads=1,
    )
    with pytest.raises(ImageError) as caught:
        strict.prepare(Caption(IMAGE), clock())
    assert caught.value.too_large
    strict.close()


def test_a_workers_error_is_in_its_future(preprocessor: Preprocessor) -> None:
    assert isinstance(preprocessor.submit(Caption(b"not an image"), clock()).exception(), ImageError)
    assert preprocessor.submit(Query("hello"), clock()).result().num_prompt_tokens > 4


@pytest.mark.parametrize(("late", "error"), [("deadline", DeadlineExceeded), ("queue_deadline", QueueTimeout)])
def test_nobody_is_decoded_whose_time_is_over(
    preprocessor: Preprocessor, late: str, error: type[KestrelError]
) -> None:
    now = time.monotonic()
    with pytest.raises(error):  # and not an ImageError
        preprocessor.prepare(Caption(b"not an image"), SequenceClock(now - 1, **{late: now}))


def test_a_culprit_is_refused_before_its_image_is_decoded(moondream3: LoadedModel) -> None:
    culprits = Culprits()
    preprocessor = Preprocessor(
        moondream3.model.config, moondream3.tokenizer, culprits, max_context=1000, max_image_pixels=1, num_threads=1
    )
    culprits.remember(fingerprint_of(Caption(b"not an image")))
    with pytest.raises(RequestRefused):
        preprocessor.prepare(Caption(b"not an image"), clock())
    with pytest.raises(ImageError):
        preprocessor.prepare(Caption(b"not that image"), clock())
    preprocessor.close()


def test_a_sequence_knows_its_tenant_and_priority(preprocessor: Preprocessor) -> None:
    query = Query("hello", options=RequestOptions(priority=Priority.BATCH))
    sequence = preprocessor.submit(query, clock(), "somebody").result()
    assert (sequence.tenant, sequence.priority) == ("somebody", Priority.BATCH)


class OneWorker:
    """A preprocessor with one thread, which notes the widths of images in the order in which it takes them."""

    def __init__(self, moondream3: LoadedModel) -> None:
        self.widths: list[int] = []
        self._has_begun, self._may_go_on = threading.Event(), threading.Event()
        config, tokenizer = moondream3.model.config, moondream3.tokenizer
        self.preprocessor = Preprocessor(
            config,
            tokenizer,
            Culprits(),
            max_context=1000,
            max_image_pixels=10**6,
            num_threads=1,
            ageing_s=10.0,
            cut=self._cut,
        )

    def after(self, *waiting: tuple[Priority, float]) -> list[int]:
        """The order in which requests of these priorities and ages in seconds are taken, by their places here."""
        now = time.monotonic()
        first = self.preprocessor.submit(Caption(picture(100)), SequenceClock(now))
        assert self._has_begun.wait(MAX_WAIT_S)
        futures = [
            self.preprocessor.submit(
                Caption(picture(width), options=RequestOptions(priority=priority)), SequenceClock(now - age_s)
            )
            for width, (priority, age_s) in enumerate(waiting, start=1)
        ]
        self._may_go_on.set()
        for future in (first, *futures):
            future.result(MAX_WAIT_S)
        self.preprocessor.close()
        return [width - 1 for width in self.widths[1:]]

    def _cut(self, image, vision):
        self.widths.append(image.width)
        self._has_begun.set()
        assert self._may_go_on.wait(MAX_WAIT_S)
        return leave_uncut(image, vision)


def picture(width_px: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width_px, 8)).save(file, "PNG")
    return file.getvalue()


def test_workers_take_the_most_urgent_first(moondream3: LoadedModel) -> None:
    waiting = [(Priority.BATCH, 0.0), (Priority.NORMAL, 0.0), (Priority.INTERACTIVE, 0.0), (Priority.NORMAL, 1.0)]
    assert OneWorker(moondream3).after(*waiting) == [2, 3, 1, 0]


def test_who_has_waited_long_enough_is_no_less_urgent(moondream3: LoadedModel) -> None:
    waiting = [(Priority.INTERACTIVE, 0.0), (Priority.BATCH, 19.0), (Priority.BATCH, 21.0)]
    assert OneWorker(moondream3).after(*waiting) == [2, 0, 1]
