import numpy as np
import pytest

from training.drawing import draw_scene
from training.palette import COLORS, distance, nearest_name, sample_color
from training.scenes import MAX_SIDE_PX, MIN_SIDE_PX, make_scene

SEEDS = range(60)


def test_a_seed_is_a_scene_to_the_pixel():
    first, second = make_scene(7), make_scene(7)
    assert first == second
    assert np.array_equal(np.asarray(draw_scene(first)), np.asarray(draw_scene(second)))


@pytest.mark.parametrize("seed", SEEDS)
def test_sizes_and_places_keep_to_their_bounds(seed: int):
    scene = make_scene(seed)
    assert min(scene.width_px, scene.height_px) >= MIN_SIDE_PX
    assert max(scene.width_px, scene.height_px) <= MAX_SIDE_PX
    for thing in scene.things:
        left, top, right, bottom = thing.box
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1


def test_scenes_come_in_every_shape_colour_and_style():
    scenes = [make_scene(seed) for seed in range(400)]
    assert {thing.name for scene in scenes for thing in scene.things} >= {
        "ring",
        "crescent",
        "word",
        "letter",
        "digit",
    }
    assert {thing.color for scene in scenes for thing in scene.things} == set(COLORS)
    assert {scene.background.kind for scene in scenes} == {
        "plain",
        "gradient",
        "stripes",
        "checks",
        "dots",
        "noise",
    }
    assert any(scene.wear.blur for scene in scenes)
    assert any(scene.wear.jpeg_quality for scene in scenes)
    assert max(scene.width_px / scene.height_px for scene in scenes) > 2.8
    assert min(scene.width_px / scene.height_px for scene in scenes) < 0.36


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_shape_shows_its_colour_at_its_mark(seed: int):
    scene = make_scene(seed)
    image = draw_scene(scene)
    worn = scene.wear.blur or scene.wear.noise or scene.wear.jpeg_quality
    for thing in scene.shapes:
        if not worn and not thing.is_hollow and thing.size in ("medium", "large"):
            x, y = thing.mark
            pixel = image.getpixel((int(x * image.width), int(y * image.height)))
            assert isinstance(pixel, tuple)
            assert distance((pixel[0], pixel[1], pixel[2]), thing.rgb) < 40


def test_values_of_a_colour_are_called_by_its_name():
    import random

    rng = random.Random(0)
    for color in COLORS:
        names = [nearest_name(sample_color(color, rng))[0] for _ in range(40)]
        assert names.count(color) >= 36, color
