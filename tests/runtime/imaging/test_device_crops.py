import gc
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel_runtime.api.images import DecodedPixels
from kestrel_runtime.imaging.crops import Crops, DecodedImage
from kestrel_runtime.imaging.device_crops import CropSource, DeviceCropper, PrefetchedImage
from tests.runtime.fake_cropping import FakeCropping

CUDA = torch.cuda.is_available()
CROPPING = FakeCropping()
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8))


def crop(image):
    crops = CROPPING.make_tensor(image)
    return crops.cuda() if CUDA else crops


def refuse(_):
    raise torch.OutOfMemoryError("no memory")


def device_cropper(crop=crop, max_images=1, digest=None, is_idle=False, on_stream=None):
    stream = torch.cuda.Stream() if CUDA else None

    def on_own_stream():
        return torch.cuda.stream(stream) if stream else nullcontext()

    options = {"max_images": max_images, "digest": digest, "is_idle": lambda: is_idle}
    return DeviceCropper(CROPPING, crop, on_stream or on_own_stream, **options)


def test_prefetched_crops_are_those_of_the_image():
    image = device_cropper()(PICTURE)
    assert isinstance(image, PrefetchedImage)
    crops = image.prefetched.claim()
    assert crops is not None
    assert torch.equal(crops.cpu(), torch.from_numpy(CROPPING.make_crops(PICTURE).pixels))


def test_prefetched_crops_are_taken_and_made_again_only_when_they_are_lost():
    image = device_cropper()(PICTURE)
    num_calls = 0

    def counted(decoded):
        nonlocal num_calls
        num_calls += 1
        return crop(decoded)

    source = CropSource(counted, torch.from_numpy)
    (first,) = source.take(1, image, range(image.num_crops), is_last=True)
    assert num_calls == 0
    (again,) = source.take(1, image, range(image.num_crops), is_last=True)
    assert torch.equal(again, first)
    assert num_calls == 1


def test_so_many_images_are_kept_until_they_are_claimed_or_freed():
    cropper = device_cropper(max_images=2)
    images = [cropper(PICTURE) for _ in range(3)]
    assert [isinstance(image, PrefetchedImage) for image in images] == [True, True, False]
    assert isinstance(images[0], PrefetchedImage)
    images[0].prefetched.claim()
    assert isinstance(cropper(PICTURE), PrefetchedImage)  # freed at once
    gc.collect()
    assert isinstance(cropper(PICTURE), PrefetchedImage)


def test_where_the_device_has_no_memory_the_image_stays_decoded():
    cropper = device_cropper(refuse)
    for _ in range(2):
        image = cropper(PICTURE)
        assert isinstance(image, DecodedImage)
        assert not isinstance(image, PrefetchedImage)


def test_prefetched_crops_are_claimed_once():
    image = device_cropper()(PICTURE)
    assert isinstance(image, PrefetchedImage)
    assert image.prefetched.claim() is not None
    assert image.prefetched.is_claimed
    assert image.prefetched.claim() is None


@pytest.mark.parametrize("size", [(20000, 3), (4000, 3000)])
def test_an_image_much_larger_than_its_crops_is_divided_into_crops_on_the_host(size):
    assert isinstance(device_cropper(refuse)(Image.new("RGB", size)), Crops)


def sums(crops):
    return crops.flatten(1).sum(1, dtype=torch.int64)[:, None]


def test_crops_have_the_digests_that_the_device_computes():
    image = device_cropper(digest=sums)(PICTURE)
    expected = sums(torch.from_numpy(CROPPING.make_crops(PICTURE).pixels))
    assert image.crop_digests(waits=True) == tuple(row.tobytes() for row in expected.numpy())
    assert image.crop_digests(waits=False) == image.crop_digests(waits=True), "known from now on"


def test_crops_that_the_host_has_made_have_digests_of_the_device_too():
    image = device_cropper(refuse, digest=sums)(Image.new("RGB", (4000, 3000)))
    assert isinstance(image, Crops)
    assert image.crop_digests(waits=False) == tuple(bytes(8) for _ in range(image.num_crops))


def test_crops_without_digests_say_so():
    assert device_cropper()(PICTURE).crop_digests(waits=True) == ()
    assert device_cropper(refuse, digest=sums)(PICTURE).crop_digests(waits=True) == ()
    assert CROPPING.make_crops(PICTURE).crop_digests(waits=True) == ()


def test_an_idle_engine_gets_an_image_before_its_crops_are_made():
    made = []
    cropper = device_cropper(lambda image: made.append(image) or crop(image), digest=sums, is_idle=True)
    image = cropper(PICTURE)
    assert isinstance(image, PrefetchedImage)
    assert made == []
    assert image.crop_digests(waits=False) is None
    crops = image.prefetched.claim()  # makes them, since no worker has begun
    assert crops is not None
    image.prefetched.make()
    image.prefetched.hash()
    assert len(made) == 1
    assert torch.equal(crops.cpu(), torch.from_numpy(CROPPING.make_crops(PICTURE).pixels))
    assert image.crop_digests(waits=True) == tuple(row.tobytes() for row in sums(crops.cpu()).numpy())


def test_an_idle_engine_does_not_await_the_copy_of_a_large_image():
    made = []
    device_cropper(lambda image: made.append(image) or crop(image), is_idle=True)(Image.new("RGB", (2000, 1100)))
    assert len(made) == 1


def test_crops_that_an_idle_engine_awaits_and_that_cannot_be_made_are_made_by_its_own_step():
    image = device_cropper(refuse, digest=sums, is_idle=True)(PICTURE)
    assert isinstance(image, PrefetchedImage)
    image.prefetched.make()
    assert image.crop_digests(waits=True) == ()
    (crops,) = CropSource(crop, torch.from_numpy).take(1, image, range(image.num_crops), is_last=True)
    assert len(crops) == image.num_crops


def test_an_idle_engine_takes_pixels_of_another_process_as_they_are():
    width_px, height_px = PICTURE.size
    shared = memoryview(PICTURE.tobytes("raw", "RGBX"))
    image = device_cropper(digest=sums, is_idle=True).keep(DecodedPixels(shared, width_px, height_px))
    expected = device_cropper(digest=sums)(PICTURE)
    assert isinstance(image, PrefetchedImage)
    assert np.shares_memory(image.pixels, np.frombuffer(shared, np.uint8))
    assert (image.rows, image.columns) == (expected.rows, expected.columns)
    assert image.crop_digests(waits=True) == expected.crop_digests(waits=True)


@pytest.mark.parametrize(("size", "is_idle"), [((140, 90), False), ((20000, 3), True)])
def test_other_pixels_are_copied(size, is_idle):
    width_px, height_px = size
    shared = DecodedPixels(memoryview(bytes(4 * width_px * height_px)), width_px, height_px)
    assert device_cropper(is_idle=is_idle).keep(shared) is None


def test_a_thread_that_stays_on_the_stream_enters_it_once():
    entered = []

    @contextmanager
    def on_stream():
        entered.append("in")
        yield
        entered.append("out")

    cropper = device_cropper(digest=sums, on_stream=on_stream, max_images=2)
    with cropper.on_thread():
        cropper(PICTURE)
        assert entered == ["in"]
    cropper(PICTURE)
    assert entered == ["in", "out"] * 3, "for crops and for digests"


def test_crops_that_are_not_needed_are_freed_unused():
    image = device_cropper()(PICTURE)
    assert isinstance(image, PrefetchedImage)
    assert CropSource(refuse, torch.from_numpy).take(1, image, (), is_last=True) == []
    assert image.prefetched.is_claimed


FIRST, SECOND = 1, 2


class CountingCropper:
    """Crops as an image's number of crops and its first pixel decide, and a count of how often it was asked."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, image):
        self.num_calls += 1
        shades = torch.arange(image.num_crops, dtype=torch.uint8) + int(image.pixels.flat[0])
        return shades[:, None, None, None].expand(-1, 2, 2, 3)


@pytest.fixture
def cropper():
    return CountingCropper()


@pytest.fixture
def source(cropper):
    return CropSource(cropper, torch.from_numpy)


def decoded(shade=0, columns=4):
    return DecodedImage(np.full((3, 5, 3), shade, dtype=np.uint8), 1, columns)


def shades(pieces):
    crops = torch.cat(pieces)
    assert crops.shape[1:] == (2, 2, 3)
    return crops[:, 0, 0, 0].tolist()


def test_crops_that_are_made_already_are_uploaded(source, cropper):
    pixels = np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3)
    one, others = source.take(FIRST, Crops(pixels, 2, 2), (1, 3, 4), is_last=True)
    assert torch.equal(one, torch.from_numpy(pixels[1:2]))
    assert torch.equal(others, torch.from_numpy(pixels[3:]))
    assert cropper.num_calls == 0


def test_an_image_is_divided_into_crops_once_for_all_the_steps_that_encode_it(source, cropper):
    first, second = decoded(), decoded(shade=100)
    assert shades(source.take(FIRST, first, range(2), is_last=False)) == [0, 1]
    assert shades(source.take(SECOND, second, range(3), is_last=False)) == [100, 101, 102]
    assert shades(source.take(FIRST, first, range(2, 4), is_last=False)) == [2, 3]
    assert shades(source.take(FIRST, first, range(4, 5), is_last=True)) == [4]
    assert shades(source.take(SECOND, second, range(3, 5), is_last=True)) == [103, 104]
    assert cropper.num_calls == 2


def test_an_image_whose_features_were_lost_is_divided_into_crops_again(source, cropper):
    image = decoded(shade=7, columns=1)
    for _ in range(2):
        assert shades(source.take(FIRST, image, range(2), is_last=True)) == [7, 8]
    assert cropper.num_calls == 2


@pytest.mark.parametrize("forget", [lambda source: source.release(FIRST), lambda source: source.clear()])
def test_crops_that_were_freed_are_made_again(source, cropper, forget):
    image = decoded()
    source.take(FIRST, image, range(2), is_last=False)
    forget(source)
    assert shades(source.take(FIRST, image, range(2), is_last=False)) == [0, 1]
    assert cropper.num_calls == 2


def test_an_image_of_which_nothing_is_kept_can_be_released(source):
    source.release(FIRST)
