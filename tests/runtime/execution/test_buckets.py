import pytest

from kestrel_runtime.execution.buckets import PrefillSize, batch_sizes, coarse_batch_sizes, largest_prefill

PAGES = 46


def usual(positions_per_image=730, *, max_tokens=8192, max_prompts=64, max_context=2048, shares=False, cuts=False):
    return PrefillSize.usual(
        positions_per_image,
        largest_prefill(max_tokens, max_prompts, PAGES, cuts_at_share_points=cuts),
        max_tokens=max_tokens,
        max_prompts=max_prompts,
        max_context=max_context,
        shares_prefixes=shares,
        cuts_at_share_points=cuts,
    )


LARGEST = largest_prefill(8192, 64, PAGES)


@pytest.mark.parametrize("most", [1, 5, 16, 64, 100])
def test_every_batch_has_a_size_little_above_it(most):
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for batch in range(1, most + 1):
        above = next(size for size in sizes if size >= batch)
        assert above <= max(2 * batch - 1, 8)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ((20,), (64, 1, 64, 1)),
        ((64,), (64, 1, 64, 1)),
        ((65,), (128, 1, 128, 1)),
        ((1025,), (1280, 1, 1280, 1)),
        ((100, 20), (128, 8, 128, 8)),
        ((30, 20, 17), (128, 4, 64, 4)),
        ((16,) * 17, (384, 64, 64, 64)),
        ((746, 746, 16), (1536, 8, 1024, 8)),
        ((746, *(16,) * 10), (1024, 64, 1024, 64)),
        ((746, 746, *(16,) * 40), (2560, 64, 1024, 64)),
    ],
)
def test_sizes_are_rounded_up_to_few(lengths, size):
    assert PrefillSize.bucket(sum(lengths), len(lengths), max(lengths), LARGEST) == (*size, PAGES)


def test_padding_has_no_more_chunks_and_samples_than_a_step_may_have():
    largest = largest_prefill(8192, 2, PAGES, cuts_at_share_points=True)
    assert PrefillSize.bucket(1500, 4, 730, largest) == (1536, 4, 1024, 2, PAGES)
    assert PrefillSize.bucket(30, 3, 10, largest) == (64, 4, 64, 2, PAGES)


def test_usual_are_prompts_of_moderate_length_and_several_questions_about_images():
    sizes = usual()
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < 50
    assert {PrefillSize(tokens, 1, tokens, 1, PAGES) for tokens in range(64, 1025, 64)} <= set(sizes)
    for count in range(2, 11):
        for text in (8, 16, 24):
            assert PrefillSize.bucket(count * (730 + text), count, 730 + text, LARGEST) in sizes
    assert all(size.num_tokens <= 8192 and size.num_chunks <= 64 for size in sizes)
    assert all(size.num_tokens <= size.num_chunks * size.max_chunk for size in sizes)


def test_a_context_shorter_than_a_usual_size_leaves_that_size_out():
    sizes = {size[:3] for size in usual(17, max_tokens=128, max_prompts=3, max_context=100)}
    assert (64, 1, 64) in sizes
    assert (128, 1, 128) not in sizes
    assert (128, 4, 64) in sizes  # of two prompts, each within the context


@pytest.mark.parametrize("cuts", [False, True])
def test_the_largest_size_holds_every_usual_one(cuts):
    largest = largest_prefill(8100, 60, PAGES, cuts_at_share_points=cuts)
    assert all(
        own <= most
        for size in usual(max_tokens=8100, max_prompts=60, shares=True, cuts=cuts)
        for own, most in zip(size, largest, strict=True)
    )


def test_with_a_cache_every_mixture_of_new_and_known_images_is_usual():
    sizes = usual(shares=True)
    assert len(sizes) < 80
    assert set(usual()) <= set(sizes)
    for text in (8, 16, 24):
        for images in range(8):
            for known in range(64 - images):
                if images + known:
                    tokens, longest = images * (730 + text) + known * text, 730 + text if images else text
                    assert PrefillSize.bucket(tokens, images + known, longest, LARGEST) in sizes


def test_a_question_about_an_image_has_two_chunks_and_one_sample_where_prompts_are_cut():
    sizes = usual(shares=True, cuts=True)
    assert len(sizes) < 100
    largest = largest_prefill(8192, 64, PAGES, cuts_at_share_points=True)
    for count in range(1, 11):
        for text in (8, 16, 24):
            assert PrefillSize.bucket(count * (730 + text), 2 * count, 730, largest) in sizes
            assert PrefillSize.bucket(count * text, count, text, largest) in sizes, "of known images"


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(("max_tokens", "max_prompts"), [(8192, 64), (1023, 7), (512, 1), (8100, 60)])
def test_few_coarse_sizes_hold_every_usual_one(cuts, max_tokens, max_prompts):
    largest = largest_prefill(max_tokens, max_prompts, PAGES, cuts_at_share_points=cuts)
    sizes = usual(max_tokens=max_tokens, max_prompts=max_prompts, shares=True, cuts=cuts)
    coarse = PrefillSize.coarse(sizes, 730, largest, chunks_of_image=1 + cuts)
    assert coarse == sorted(coarse, reverse=True)
    assert set(coarse) <= set(sizes)
    assert len(coarse) < 20
    assert all(any(own.holds(size) for own in coarse) for size in sizes)


def test_up_to_eight_new_images_at_once_are_not_padded_to_more_images():
    coarse = PrefillSize.coarse(usual(shares=True), 730, LARGEST, chunks_of_image=1)
    for count in range(1, 9):
        size = PrefillSize.bucket(count * 746, count, 746, LARGEST)
        assert size in coarse


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (5, [1, 5]), (64, [1, 8, 16, 32, 64]), (100, [1, 8, 24, 48, 100])]
)
def test_coarse_batches_are_one_and_halves_down_to_eight(most, sizes):
    assert coarse_batch_sizes(most) == sizes
    assert set(sizes) <= set(batch_sizes(most))
