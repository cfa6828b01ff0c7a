"""The pictures and questions of the load."""

import io
from collections import Counter

import pytest
from PIL import Image

from bench.harness.workload import NUM_RETURNING, WORKLOADS, Album, chart
from kestrel_grpc.cli.bench.workload import HEIGHT_PX, WIDTH_PX
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from tests.bench.small import SMALL_2


def pixels(jpeg: bytes) -> bytes:
    return Image.open(io.BytesIO(jpeg)).convert("RGB").tobytes()


@pytest.fixture(scope="module")
def album() -> Album:
    return Album(3)


def test_a_chart_has_nine_crops():
    rows, columns = MoondreamCropping(SMALL_2.vision).select(HEIGHT_PX, WIDTH_PX)
    assert 1 + rows * columns == 9


def test_no_file_comes_twice_though_drawings_do(album: Album):
    files = [album.picture(WORKLOADS["direct"], number) for number in range(9)]
    assert len(set(files)) == 9
    assert files[0] is not None
    assert files[3] is not None
    assert pixels(files[0]) == pixels(files[3]) == pixels(chart(0))


def test_a_cached_picture_is_the_same_file_with_other_questions(album: Album):
    cached = WORKLOADS["cached"]
    assert len({album.picture(cached, number) for number in range(9)}) == 1
    assert len({cached.question(number) for number in range(9)}) == 9


def test_a_share_of_the_requests_shows_popular_pictures_and_the_first_of_them_most(album: Album):
    half = [album.picture(WORKLOADS["repeats-50"], number) for number in range(4_000)]
    counts = Counter(half)
    repeated = sum(count for count in counts.values() if count > 1)
    assert 0.4 < repeated / len(half) < 0.5  # of 2,000 draws some show a picture that comes only once
    most, second = (count for _, count in counts.most_common(2))
    assert most / 2_000 == pytest.approx(1 / 7.485, rel=0.2)  # the sum of 1 / rank up to 1,000
    assert second / most == pytest.approx(0.5, rel=0.25)


def test_without_repeats_no_file_comes_twice(album: Album):
    assert len({album.picture(WORKLOADS["repeats-0"], number) for number in range(500)}) == 500


def test_a_picture_that_returns_is_asked_about_so_often_among_others(album: Album):
    workload = WORKLOADS["returning-5"]
    files = [album.picture(workload, number) for number in range(2 * 5 * NUM_RETURNING)]
    assert set(Counter(files).values()) == {5}
    assert len(set(files[: 5 * NUM_RETURNING])) == NUM_RETURNING
    assert len(set(files[:10])) > 5, "mixed"
