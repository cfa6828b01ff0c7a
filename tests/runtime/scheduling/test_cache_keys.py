"""Equal content has equal keys; whatever changes a result changes all keys behind it."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.cache_keys import (
    FIELDS_WITHOUT_EFFECT,
    CacheScope,
    ImageContent,
    PrefixKeyMaker,
    PrefixKeys,
    key_parts,
)

CAT, DOG = b"c" * 32, b"d" * 32
WORDS = [Token(id) for id in range(40)]


def keys_of(
    tokens: list[Token],
    num_image_tokens: int = 0,
    image: bytes | None = None,
    namespace: str = "",
    page_size: int = 4,
) -> PrefixKeys:
    return PrefixKeyMaker({"model": "m"}, page_size).keys(tokens, pictured(num_image_tokens, image), namespace)


def pictured(num_image_tokens: int, image: bytes | None = CAT) -> tuple[ImageContent, ...]:
    """The image of a prompt, behind its first token."""
    return () if image is None else (ImageContent(1, num_image_tokens, image),)


def test_each_full_page_has_a_key_and_so_has_the_end_of_an_image_inside_a_page():
    keys = keys_of(WORDS[:6], 9, CAT)
    assert len(keys.pages) == 3
    assert keys.boundaries.keys() == {10}
    assert (keys.spans, keys.scope) == (((0, 10),), CacheScope("", frozenset({CAT})))
    assert not keys_of(WORDS[:6], 7, CAT).boundaries, "the image ends where a page does"
    assert len({*keys.pages, *keys.boundaries.values(), keys.root}) == 5, "no key is that of something else"


def test_questions_about_one_image_share_its_keys_and_no_more():
    first, second = keys_of([*WORDS[:1], Token(77)] * 3, 9, CAT), keys_of([*WORDS[:1], Token(78)] * 3, 9, CAT)
    assert first.boundaries == second.boundaries
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]


@pytest.mark.parametrize(
    ("tokens", "num_image_tokens", "image", "namespace"),
    [
        ([Token(9), *WORDS[1:]], 9, CAT, ""),
        (WORDS, 9, DOG, ""),
        (WORDS, 9, CAT, "another tenant"),
        (WORDS, 8, CAT, ""),
        (WORDS, 0, None, ""),
    ],
    ids=["first token", "image", "namespace", "size of the image", "no image"],
)
def test_another_beginning_changes_every_key(
    tokens: list[Token], num_image_tokens: int, image: bytes | None, namespace: str
):
    own, other = keys_of(WORDS, 9, CAT), keys_of(tokens, num_image_tokens, image, namespace)
    assert not {*own.pages, *own.boundaries.values()} & {*other.pages, *other.boundaries.values()}


def test_values_of_tokens_are_part_of_the_keys():
    variants = [(), (0.5,), (0.25,), (0.5, 0.5), (-0.0,), (0.0,)]
    all_keys = [keys_of([*WORDS[:3], Token(3, value)]).pages[0] for value in variants]
    assert len(set(all_keys)) == len(variants)


def test_borders_between_parts_do_not_move():
    roots = [
        PrefixKeyMaker(parts, 4).root(namespace)
        for parts, namespace in [({"ab": "c"}, ""), ({"a": "bc"}, ""), ({"a": "b"}, "c"), ({"a": "b", "c": ""}, "")]
    ]
    assert len(set(roots)) == 4


def test_keys_that_are_added_page_by_page_equal_those_of_the_whole():
    for num_image_tokens, image in ((0, None), (9, CAT), (7, CAT)):
        whole, grown = keys_of(WORDS, num_image_tokens, image), keys_of(WORDS[:2], num_image_tokens, image)
        for num_positions in range(len(WORDS) + num_image_tokens + 1):
            grown.extend(WORDS, num_positions, 4)
        assert grown == whole


def test_the_keys_of_a_known_image_are_the_same_as_at_first():
    maker = PrefixKeyMaker({}, 4)
    first, again = (maker.keys(WORDS[:6], pictured(9)) for _ in range(2))
    assert first == again
    first.pages.append(first.root)
    assert maker.keys(WORDS[:6], pictured(9)) == again, "sequences do not share lists"


def test_the_first_share_point_that_is_missing_is_named():
    keys = keys_of(WORDS[:6], 9, CAT)
    assert keys.missing_share_point(0, 4) == keys.boundaries[10]
    assert keys.missing_share_point(10, 4) is None
    at_page_end = keys_of(WORDS[:6], 7, CAT)
    assert at_page_end.missing_share_point(0, 4) == at_page_end.pages[1]
    assert keys_of(WORDS).missing_share_point(0, 4) is None


TWO = (ImageContent(2, 9, CAT), ImageContent(13, 9, DOG))
"""Two words, an image up to 11, two words, an image up to 22, the other words."""


def test_a_further_image_changes_the_keys_from_the_page_with_its_beginning_on():
    maker = PrefixKeyMaker({}, 4)
    own, other = (maker.keys(WORDS, images) for images in (TWO, (TWO[0], ImageContent(13, 9, CAT))))
    assert own.spans == ((2, 11), (13, 22))
    assert own.boundaries.keys() == {11, 22}
    assert own.pages[:3] == other.pages[:3]
    assert own.boundaries[11] == other.boundaries[11]
    assert not {*own.pages[3:], own.boundaries[22]} & {*other.pages[3:], other.boundaries[22]}
    assert own.missing_share_point(0, 4) == own.boundaries[11]
    assert own.missing_share_point(11, 4) == own.boundaries[22]
    assert own.missing_share_point(22, 4) is None


def test_an_image_at_another_place_has_other_keys():
    maker = PrefixKeyMaker({}, 4)
    own, moved = maker.keys([WORDS[0]] * 40, TWO[:1]), maker.keys([WORDS[0]] * 40, (ImageContent(3, 9, CAT),))
    assert not {*own.pages, *own.boundaries.values()} & {*moved.pages, *moved.boundaries.values()}


@pytest.mark.parametrize("images", [(), TWO[:1], TWO, (ImageContent(1, 9, CAT), ImageContent(13, 9, DOG))])
@pytest.mark.parametrize("num_words", [7, 8, 9, 10, 11])
def test_a_prompt_with_an_earlier_answer_finds_the_keys_with_which_that_answer_ended(
    images: tuple[ImageContent, ...], num_words: int
):
    maker = PrefixKeyMaker({}, 4)
    asked = maker.keys(WORDS[:5], images)
    end = num_words + sum(image.num_positions for image in images)
    asked.add_share_point(WORDS[:num_words], end, 4)
    next_turn = maker.keys([*WORDS[:num_words], *WORDS[30:]], images, answer_ends=(end,))
    assert next_turn.share_point(end, 4) == asked.share_point(end, 4)
    other = maker.keys([*WORDS[: num_words - 1], *WORDS[30:]], images, answer_ends=(end,))
    assert other.share_point(end, 4) != asked.share_point(end, 4)


OTHER_VALUES: dict[str, Any] = {
    "revision": "r2",
    "cuda_graphs": True,
    "kernels": (("rotary_write_kv", "reference"),),
    "prefix_cache": False,
    "max_batch_size": 5,
    "num_kv_pages": 77,
    "memory_limit": 2**33,
    "image_cache_bytes": 12345,
    "crop_cache_bytes": 54321,
    "adapters": "/somewhere",
    "adapter_repositories": ("org/name",),
    "num_adapter_slots": 3,
    "max_adapter_rank": 5,
    "max_decoded_image_bytes": 2**30,
    "resize_on_device": True,
    "max_prefill_tokens": 33,
    "max_crops_per_step": 3,
    "step_timeout_s": 5.0,
}


def another(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else value + 1


def test_every_field_of_the_configuration_changes_the_keys_or_is_known_to_change_no_result():
    config = EngineConfig()
    root = PrefixKeyMaker(key_parts(config), 16).root("")
    for item in fields(EngineConfig):
        value = OTHER_VALUES.get(item.name)
        changed = replace(config, **{item.name: another(getattr(config, item.name)) if value is None else value})
        assert changed != config
        has_changed = PrefixKeyMaker(key_parts(changed), 16).root("") != root
        assert has_changed == (item.name not in FIELDS_WITHOUT_EFFECT), item.name
    assert FIELDS_WITHOUT_EFFECT.keys() <= {item.name for item in fields(EngineConfig)}
    assert all(FIELDS_WITHOUT_EFFECT.values()), "each with a reason"


def test_what_the_model_is_changes_the_keys():
    parts = [
        key_parts(EngineConfig(), model=model, dtype=dtype)
        for model, dtype in itertools.product(("a", "b"), ("float32", "bfloat16"))
    ]
    assert len({PrefixKeyMaker(part, 16).root("") for part in parts}) == 4


def test_an_adapter_changes_every_key_of_a_prompt_and_none_of_its_image():
    maker = PrefixKeyMaker({"model": "m"}, 4)
    without, first, second = (
        maker.keys(WORDS, pictured(9), "", adapter) for adapter in (b"", b"1" * 32, b"2" * 32)
    )
    for keys, others in ((first, without), (first, second), (second, without)):
        assert not {keys.root, *keys.pages, *keys.boundaries.values()} & {
            others.root,
            *others.pages,
            *others.boundaries.values(),
        }
    assert maker.keys(WORDS, pictured(9), "", b"1" * 32) == first
