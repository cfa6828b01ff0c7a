"""Which images count as the same for the prefix cache, and that each is answered about as it is without a cache."""

import io
import time
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import CachePolicy, Query, RequestOptions, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
WIDTH, HEIGHT = 96, 48
PREFIX = 82
"""Positions of the first token and of an image."""


@pytest.fixture(scope="module")
def engine(shallow3: LoadedModel) -> Iterator[LocalEngine]:
    """Caches outlive a test, so each test has images of its own."""
    engine = LocalEngine(shallow3, EngineConfig(model="", num_kv_pages=512))
    yield engine
    engine.close()


def picture(seed: int) -> Image.Image:
    """Blocks of colour: no two seeds, and no two orientations of one, look alike."""
    blocks = np.random.default_rng(seed).integers(0, 255, (4, 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


async def ask(engine: LocalEngine, image: bytes | RawImage, policy: CachePolicy = CachePolicy.USE) -> Finished:
    request = Query("What is in this image?", image, sampling=GREEDY, options=RequestOptions(cache=policy))
    return await engine.submit(request).result()


async def computed(engine: LocalEngine, image: bytes | RawImage) -> Finished:
    """The answer to a first question about an image, which is the one without a cache."""
    plain = await ask(engine, image, CachePolicy.BYPASS)
    first = await ask(engine, image)
    assert plain.usage.num_cached_tokens == 0
    assert first.usage.num_cached_tokens == 0, "nothing of another image is used"
    assert first.output == plain.output
    return first


async def known(engine: LocalEngine, image: bytes | RawImage) -> Finished:
    """The answer to a further question about the same image."""
    again = await ask(engine, image)
    assert again.usage.num_cached_tokens >= PREFIX
    return again


async def test_pixels_with_equal_bytes_and_another_shape_are_another_image(engine: LocalEngine):
    pixels = picture(1).tobytes()
    shapes = [
        RawImage.packed(pixels, WIDTH, HEIGHT, PixelFormat.RGB8),
        RawImage.packed(pixels, HEIGHT, WIDTH, PixelFormat.RGB8),
        RawImage.packed(pixels, WIDTH, HEIGHT, PixelFormat.BGR8),
        RawImage.packed(pixels, WIDTH * 3, HEIGHT, PixelFormat.GRAY8),
        RawImage(pixels, WIDTH - 1, HEIGHT, PixelFormat.RGB8, WIDTH * 3),
    ]
    first = [await computed(engine, image) for image in shapes]
    assert [(await known(engine, image)).output for image in shapes] == [item.output for item in first]


async def test_pixels_and_the_bytes_of_a_file_are_different_images_though_the_bytes_are_equal(engine: LocalEngine):
    file = encoded(picture(2))
    await computed(engine, file)
    row = RawImage.packed(file, len(file), 1, PixelFormat.GRAY8)
    await computed(engine, row)
    await known(engine, file)
    await known(engine, row)


async def test_of_an_animation_the_first_frame_counts(engine: LocalEngine):
    first, second, third = picture(3), picture(4), picture(5)
    still = encoded(first)
    one = encoded(first, save_all=True, append_images=[second])
    other = encoded(first, save_all=True, append_images=[third])
    reverse = encoded(second, save_all=True, append_images=[first])
    answer = (await computed(engine, still)).output
    assert (await computed(engine, one)).output == answer
    assert (await computed(engine, other)).output == answer, "another file, so nothing is shared"
    await computed(engine, reverse)
    assert (await known(engine, one)).output == answer


async def test_each_orientation_of_exif_is_an_image_of_its_own_and_shown_upright(engine: LocalEngine):
    turned = picture(6)
    upright = {
        1: turned,
        3: turned.transpose(Image.Transpose.ROTATE_180),
        6: turned.transpose(Image.Transpose.ROTATE_270),
        8: turned.transpose(Image.Transpose.ROTATE_90),
    }
    for orientation, seen in upright.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = encoded(turned, exif=exif)
        answer = (await computed(engine, file)).output
        assert (await computed(engine, encoded(seen))).output == answer
        assert (await known(engine, file)).output == answer


async def test_an_image_that_is_encoded_again_is_new_and_answered_the_same(engine: LocalEngine):
    image = picture(7)
    answers = [
        (await computed(engine, file)).output
        for file in (
            encoded(image),
            encoded(image, compress_level=0),
            encoded(image, "BMP"),
            encoded(image, "WEBP", lossless=True),
        )
    ]
    assert answers == answers[:1] * 4, "the pixels are the same"


async def test_a_truncated_image_is_refused_each_time_and_never_cached(engine: LocalEngine):
    whole = encoded(picture(8))
    cut = whole[: len(whole) * 3 // 4]
    before = engine.load().prefix_cache
    for _ in range(2):
        with pytest.raises(ImageError):
            await ask(engine, cut)
    after = engine.load().prefix_cache
    assert after.used_bytes == before.used_bytes
    assert after.num_hits == before.num_hits
    await computed(engine, whole)
    with pytest.raises(ImageError):
        await ask(engine, cut)


async def test_both_tiers_know_how_old_their_oldest_entry_is(engine: LocalEngine):
    await engine.clear_cache()
    load = engine.load()
    assert (load.prefix_cache.oldest_age_s, load.image_cache.oldest_age_s) == (0.0, 0.0)
    began = time.monotonic()
    await ask(engine, encoded(picture(9)))
    load, passed_s = engine.load(), time.monotonic() - began
    for cache in (load.prefix_cache, load.image_cache):
        assert cache.oldest_age_s is not None
        assert 0.0 < cache.oldest_age_s < passed_s
