"""The pictures and questions of the load."""

import io
from collections import Counter

import pytest
from PIL import Image

from bench.harness.workload import NUM_RETURNING, NUM_STREAMS, WORKLOADS, Album
from kestrel_grpc.cli.bench.workload import HEIGHT_PX, WIDTH_PX
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from tests.bench.small import SMALL_2


def crops_of(file: bytes | None) -> list[bytes]:
    """The pixels of each crop."""
    assert file is not None
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    return [crop.tobytes() for crop in MoondreamCropping(SMALL_2.vision).make_crops(picture).pixels]


@pytest.fixture(scope="module")
def album() -> Album:
    return Album(3)


def test_a_chart_has_nine_crops():
    rows, columns = MoondreamCropping(SMALL_2.vision).select(HEIGHT_PX, WIDTH_PX)
    assert 1 + rows * columns == 9


def test_no_file_comes_twice_though_drawings_do(album: Album):
    files = [album.picture(WORKLOADS["direct"], number) for number in range(9)]
    assert len(set(files)) == 9
    assert Image.open(io.BytesIO(files[3] or b"")).size == (WIDTH_PX, HEIGHT_PX)
    crops = Counter(crop for file in files for crop in crops_of(file))
    assert set(crops.values()) == {1}, "no crop comes twice either"


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


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("changed", 2, 2),
        ("changed-png", 2, 2),
        ("changed-pointer", 2, 8),
        ("changed-typed", 0, 4),
        ("changed-scroll", 9, 9),
        ("changed-noise", 9, 9),
    ],
)
def test_the_next_picture_of_a_caller_changes_in_so_many_crops(name: str, least: int, most: int):
    first, second = Album(1), Album(1)
    numbers = [5 + NUM_STREAMS * version for version in range(4)]
    files = [first.picture(WORKLOADS[name], number) for number in numbers]
    assert second.picture(WORKLOADS[name], numbers[2]) == files[2], "the same in any order"
    assert second.picture(WORKLOADS[name], numbers[1]) == files[1]
    seen = set(crops_of(files[0]))
    for file in files[1:]:
        crops = set(crops_of(file))
        assert least <= len(crops - seen) <= most
        seen |= crops
