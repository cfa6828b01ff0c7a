"""What the engine does with images that are large, slow to decode, or not wanted any more."""

import asyncio
import io
import threading
from collections.abc import Callable

import numpy as np
import pytest
from PIL import ExifTags, Image

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import EngineUnavailable, ImageError
from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import Caption, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.workers import Interrupted
from kestrel_runtime.models.loaded_model import LoadedModel
from tests import hostile_images
from tests.runtime.engine.test_engine import SMALL_IMAGE, error_of, settled


async def test_an_image_of_a_caller_who_has_gone_is_not_decoded_to_its_end(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    stops: list[BaseException] = []

    def decode(*_: object, check_wanted: Callable[[], None], **__: object) -> None:
        has_begun.set()
        may_go_on.wait()
        try:
            check_wanted()
        except BaseException as stop:
            stops.append(stop)
            raise
        finally:
            ended.set()

    monkeypatch.setattr("kestrel_runtime.engine.preprocessing.decode_image", decode)
    stream = engine.submit(Caption(SMALL_IMAGE))
    await asyncio.to_thread(has_begun.wait)
    stream.cancel()
    may_go_on.set()
    await asyncio.to_thread(ended.wait)
    assert [type(stop) for stop in stops] == [Interrupted]
    monkeypatch.undo()
    await settled(engine)
    assert engine.load().num_preprocessing == 0


async def test_a_decoder_that_does_not_end_keeps_neither_the_engine_nor_its_caller(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def decode(*_: object, **__: object) -> None:
        has_begun.set()
        may_end.wait()

    monkeypatch.setattr("kestrel_runtime.engine.preprocessing.decode_image", decode)
    engine = LocalEngine(loaded, EngineConfig(model=""))
    try:
        stream = engine.submit(Caption(SMALL_IMAGE))
        await asyncio.to_thread(has_begun.wait)
        await asyncio.to_thread(engine.close)
        assert isinstance(await error_of(stream), EngineUnavailable)
    finally:
        may_end.set()


@pytest.mark.parametrize("padding", [b"", bytes(2**19)], ids=["hashed at once", "hashed by a worker"])
async def test_the_size_of_the_upright_image_is_told_whether_it_was_cached_or_not(
    engine: LocalEngine, padding: bytes
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, format="JPEG", exif=exif)
    request = Caption(file.getvalue() + padding, sampling=SamplingParams(max_tokens=1))
    first, second = await engine.submit(request).result(), await engine.submit(request).result()
    assert (first.image_size_px, second.image_size_px) == ((30, 40), (30, 40))
    assert second.usage.num_cached_tokens > 0
    raw = RawImage(bytes(4 * 3 * 3), 4, 3, PixelFormat.RGB8, 12)
    third = await engine.submit(Caption(raw, sampling=SamplingParams(max_tokens=1))).result()
    assert third.image_size_px == (4, 3)


def test_the_memory_of_images_is_as_configured(loaded: LoadedModel, engine: LocalEngine) -> None:
    large = hostile_images.png(2000, 1000, colour_type=2)
    assert engine._preprocessor.inspect(large) is not None  # starts nothing
    config = EngineConfig(model="", num_kv_pages=60, max_decoded_image_bytes=16 * 2**20)
    small = LocalEngine(loaded, config)
    try:
        with pytest.raises(ImageError, match="must take at most 12 MiB while it is decoded"):
            small._preprocessor.inspect(large)
    finally:
        small.close()


@pytest.mark.parametrize("pixel_format", [PixelFormat.RGB8, PixelFormat.BGR8])
async def test_pixels_are_answered_about_as_a_file_of_them_is(
    engine: LocalEngine, pixel_format: PixelFormat
) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(SMALL_IMAGE)).convert("RGB"))
    height, width, _ = pixels.shape
    if pixel_format is PixelFormat.BGR8:
        pixels = pixels[:, :, ::-1]
    image = RawImage.packed(pixels.tobytes(), width, height, pixel_format)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    of_pixels = await engine.submit(Caption(image, sampling=greedy)).result()
    of_file = await engine.submit(Caption(SMALL_IMAGE, sampling=greedy)).result()
    assert of_pixels.output == of_file.output
    assert of_pixels.usage.num_image_tokens == of_file.usage.num_image_tokens > 0


@pytest.mark.parametrize(
    "image",
    [
        RawImage.packed(bytes(12), 2, 2, PixelFormat.RGB8),
        RawImage(bytes(6), 2, 1, PixelFormat.RGB8, row_stride_bytes=2**31 - 1),
    ],
    ids=["pixels", "padding"],
)
async def test_pixels_above_the_limit_of_images_are_refused(image: RawImage, loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_image_bytes=11))
    try:
        with pytest.raises(ImageError) as caught:
            await engine.submit(Caption(image)).result()
        assert caught.value.too_large
    finally:
        engine.close()
