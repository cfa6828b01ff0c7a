"""How many pages the key-value cache gets, and how the rest of the memory is divided. No model, plain numbers."""

from dataclasses import replace

import pytest
import torch

from kestrel_runtime.api.config import MIB
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.memory import plan as memory_plan
from kestrel_runtime.memory.plan import MARGIN_BYTES, MemoryNeeds, MemoryReading, crop_cache_bytes, plan_memory

GIB = 2**30
NEEDS = MemoryNeeds(
    page_bytes=3_145_731,
    least_pages=47,
    batch_pages=8191,
    activation_bytes=1_234_567_891,
    graph_bytes=2_345_678_917,
    image_bytes=345_678_919,
)
A_GPU = MemoryReading(
    total_bytes=84_987_740_161, available_bytes=80_123_456_789, weight_bytes=3_700_000_007, is_host=False
)
A_HOST = MemoryReading(
    total_bytes=17_179_869_184, available_bytes=9_480_000_011, weight_bytes=6_700_000_003, is_host=True
)


def num_pages(reading: MemoryReading, needs: MemoryNeeds = NEEDS, utilization: float = 0.9) -> int:
    return plan_memory(reading, needs, utilization)[0]


def test_on_a_gpu_the_cache_gets_what_the_utilization_leaves_beside_all_else():
    used = 84_987_740_161 - 80_123_456_789
    rest = 0.9 * 84_987_740_161 - used - 1_234_567_891 - 2_345_678_917 - 345_678_919 - 268_435_456
    assert num_pages(A_GPU) == int(rest // 3_145_731) == 21435


@pytest.mark.parametrize(
    "term", ["activation_bytes", "graph_bytes", "image_bytes", "image_cache_bytes", "crop_cache_bytes"]
)
@pytest.mark.parametrize("reading", [A_GPU, A_HOST])
def test_each_term_takes_its_bytes_from_the_cache(term: str, reading: MemoryReading):
    more = replace(NEEDS, **{term: getattr(NEEDS, term) + 101 * NEEDS.page_bytes})
    assert num_pages(reading) - num_pages(reading, more) == 101


def test_memory_that_neighbours_on_the_gpu_take_is_not_taken_twice():
    beside_a_neighbour = replace(A_GPU, available_bytes=A_GPU.available_bytes - 1009 * NEEDS.page_bytes)
    assert num_pages(A_GPU) - num_pages(beside_a_neighbour) == 1009
    _, alone = plan_memory(A_GPU, NEEDS, 0.9)
    _, together = plan_memory(beside_a_neighbour, NEEDS, 0.9)
    assert together.other_bytes - alone.other_bytes == 1009 * NEEDS.page_bytes
    assert together.weight_bytes == alone.weight_bytes


def test_the_utilization_of_a_gpu_counts_all_of_its_memory_and_that_of_a_host_what_is_available():
    difference = num_pages(A_GPU, utilization=0.8) - num_pages(A_GPU, utilization=0.3)
    assert difference == pytest.approx(0.5 * A_GPU.total_bytes / NEEDS.page_bytes, abs=1)
    assert num_pages(A_HOST, utilization=1.0) - num_pages(A_HOST, utilization=0.7) == pytest.approx(
        0.3 * A_HOST.available_bytes / NEEDS.page_bytes, abs=1
    )


def test_a_gpu_may_be_filled_but_for_what_is_planned_for_other_things():
    pages, plan = plan_memory(A_GPU, NEEDS, 1.0)
    assert 0 <= plan.free_bytes < NEEDS.page_bytes
    assert plan.cache_bytes == pages * NEEDS.page_bytes


@pytest.mark.parametrize("utilization", [0.41, 0.9, 1.0])
@pytest.mark.parametrize("reading", [A_GPU, A_HOST])
def test_the_terms_of_a_plan_are_all_of_the_memory(utilization: float, reading: MemoryReading):
    small = replace(NEEDS, activation_bytes=1_234_567, graph_bytes=2_345_671)
    _, plan = plan_memory(reading, small, utilization)
    assert sum(num_bytes for _, num_bytes in plan.terms()) == plan.total_bytes == reading.total_bytes
    assert all(num_bytes >= 0 for _, num_bytes in plan.terms())
    assert (plan.utilization, plan.margin_bytes) == (utilization, MARGIN_BYTES) == (utilization, 256 * MIB)


def test_the_table_has_a_line_for_every_term_and_the_total():
    _, plan = plan_memory(A_GPU, NEEDS, 0.9)
    lines = plan.table().splitlines()
    assert len(lines) == len(plan.terms()) + 1
    assert lines[0].split() == ["weights", "3.45", "GiB"]
    assert lines[1].split() == ["KV", "cache", "62.80", "GiB"]
    assert lines[-1].split() == ["total", "79.15", "GiB"]


def test_beside_a_cpu_the_cache_gets_no_more_than_a_full_batch_needs():
    assert num_pages(A_HOST, replace(NEEDS, batch_pages=613)) == 613
    assert num_pages(A_GPU, replace(NEEDS, batch_pages=613)) > 613
    # A page for each of a few short requests could not hold one with an image.
    assert num_pages(A_HOST, replace(NEEDS, batch_pages=3)) == 47


def test_a_pod_of_sixteen_gibibytes_keeps_moondream_2_within_them():
    # Moondream 2 in float32: 7.7 GB of weights, 6.3 MB a page, 0.9 GB of activations, 0.7 GB of images.
    needs = MemoryNeeds(2 * 24 * 16 * 2048 * 4, 47, 16 * 128, 857_000_000, 0, 716_000_000)
    available = 16 * GIB - 7_700_000_000
    reading = MemoryReading(16 * GIB, available, 7_700_000_000, is_host=True)
    pages, plan = plan_memory(reading, needs, 0.9)
    assert 47 < pages < 16 * 128
    spent = plan.cache_bytes + plan.activation_bytes + plan.image_bytes + plan.margin_bytes
    assert 0.9 * available - needs.page_bytes < spent <= 0.9 * available


@pytest.mark.parametrize(
    ("term", "name", "advice"),
    [
        ("activation_bytes", "activations", "--max-prefill-tokens"),
        ("graph_bytes", "CUDA graphs", "--cuda-graphs off"),
        ("image_bytes", "images", "--max-decoded-image-bytes"),
    ],
)
def test_a_start_without_room_is_refused_by_the_name_of_what_takes_most(term: str, name: str, advice: str):
    needs = replace(NEEDS, **{term: 76 * GIB})
    with pytest.raises(CheckpointError) as caught:
        plan_memory(A_GPU, needs, 0.9)
    message = str(caught.value)
    assert "0 pages cannot hold one request with an image: 47 pages are the least" in message
    assert f"the largest part is taken by: {name}. To free memory, " in message
    assert advice in message
    assert f"{name} 76.00 GiB" in message


def test_weights_neighbours_and_a_small_utilization_are_named_too():
    for reading, utilization, name in (
        (replace(A_GPU, available_bytes=9 * GIB, weight_bytes=60 * GIB), 0.9, "weights"),
        (replace(A_GPU, available_bytes=9 * GIB, weight_bytes=3 * GIB), 0.9, "other processes"),
        (A_GPU, 0.05, "what may not be used"),
        (A_HOST, 0.05, "what may not be used"),
    ):
        with pytest.raises(CheckpointError, match=f"the largest part is taken by: {name}"):
            plan_memory(reading, NEEDS, utilization)


def test_the_least_pages_suffice_and_one_less_does_not():
    beside = sum((NEEDS.activation_bytes, NEEDS.graph_bytes, NEEDS.image_bytes, MARGIN_BYTES))
    just_enough = replace(A_GPU, available_bytes=beside + 47 * NEEDS.page_bytes)
    assert num_pages(just_enough, utilization=1.0) == 47
    with pytest.raises(CheckpointError, match="a key-value cache of 46 pages"):
        num_pages(replace(just_enough, available_bytes=just_enough.available_bytes - 1), utilization=1.0)


def test_pages_asked_for_are_taken_whatever_the_plan_would_be_but_not_fewer_than_the_least():
    crowded = replace(A_GPU, available_bytes=GIB)
    pages, plan = plan_memory(crowded, NEEDS, 0.9, num_pages=512)
    assert pages == 512
    assert plan.free_bytes < 0  # more is planned than there is
    with pytest.raises(CheckpointError, match=r"46 pages .* 47 pages are the least.* \(--kv-pages\)"):
        plan_memory(A_GPU, NEEDS, 0.9, num_pages=46)


def test_a_gpu_is_read_once_torch_has_given_back_what_it_only_keeps(monkeypatch: pytest.MonkeyPatch):
    reserved = [7_000_003]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.__setitem__(0, 5_000_011))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90_000_049 - reserved[0], 100_000_007))
    reading = MemoryReading.of(torch.device("cuda"), weight_bytes=11)
    assert reading == MemoryReading(100_000_007, 85_000_038, 5_000_011, is_host=False)
    assert reading.used_bytes == 14_999_969


@pytest.mark.parametrize(
    ("limit", "total", "available"), [(40, 40, 25), (10, 10, 0), (100, 100, 85), (300, 100, 85)]
)
def test_a_limit_takes_what_is_beyond_it_from_a_gpu(
    limit: int, total: int, available: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (85, 100))
    reading = MemoryReading.of(torch.device("cuda"), 0, limit)
    assert reading == MemoryReading(total, available, 9, is_host=False)
    assert reading.usable_bytes(0.5) == pytest.approx(0.5 * total - (total - available))


def test_weights_on_the_host_that_count_as_available_are_not_taken_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_plan, "total_memory_bytes", lambda: 1_000_003)
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: 900_001)
    assert MemoryReading.of(torch.device("cpu"), 50_021).weight_bytes == 50_021
    assert MemoryReading.of(torch.device("cpu"), 500_009).weight_bytes == 100_002


@pytest.mark.parametrize(
    ("configured", "available", "is_host", "crops"),
    [
        (None, 10**12, False, 1024),
        (None, 10**12, True, 128),
        (None, 32 * 77 * 1_679_616, False, 77),  # a thirty-second
        (5 * 1_679_616 + 7, 10**12, False, 5),
        (0, 10**12, False, 0),
    ],
)
def test_encoded_crops_get_the_bytes_of_a_whole_number(
    configured: int | None, available: int, crops: int, *, is_host: bool
):
    assert crop_cache_bytes(configured, 1_679_616, available, is_host=is_host) == crops * 1_679_616
