"""Scenes to arrays: crops of the pictures, and rows of examples that share a picture.

A row holds many examples of one picture one after another; none sees another. A row of a pair may hold a second
picture too: before all examples, which then may see it, or within one of them, between its turns. Knows the
vocabulary and the vision configuration, no weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kestrel_runtime.api.requests import Role
from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.region import SIZE_OCTAVES
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.output.output_parser import Token
from training.conversing import ConversingTeacher
from training.drawing import draw_scene
from training.examples import Example, Teacher
from training.scenes import TRAINED, Scene, World, make_scene

ROW_TOKENS = 383  # with BOS and 256 image tokens 640, a length that kernels like
PAIR_ROW_TOKENS = 639  # one picture more: 896
MAX_EXAMPLES = 48
SHARED = MAX_EXAMPLES
"""The number that stands for a second picture which precedes all examples."""
_DRAWN_AREA_PX = 430**2
_INPUT_JITTER = 2.0  # bins by which a given coordinate may be off, as generated ones are

KINDS = (
    "count", "color", "shape", "relation", "size", "reading", "presence", "contents", "place", "background",
    "pointed", "arithmetic", "opposite", "counting", "language", "self", "reasoning", "caption short",
    "caption normal", "caption long", "point", "point absent", "detect", "detect absent", "segment",
    "segment absent", "instructed", "record", "dialogue", "pair", "later picture",
)  # fmt: skip


@dataclass(slots=True)
class Rows:
    """Examples in rows: [rows, tokens] each, `values` and `size_bins` with two columns more."""

    ids: Tensor
    values: Tensor
    """What a coordinate (first column) or size token (both) is worth."""
    example: Tensor
    """Number of the example in its row from 1; 0 is filling, and `SHARED` a picture for several examples."""
    position: Tensor
    sees_image: Tensor
    sees_second: Tensor
    """True if the token sees the second picture that precedes all examples."""
    patch: Tensor
    """The number of the second picture's token that is here, else -1."""
    target: Tensor
    """The next token where it is to be learnt, else -100."""
    weight: Tensor
    coord_bin: Tensor
    """The next coordinate, else -1."""
    size_bins: Tensor
    kind: Tensor
    """[rows, MAX_EXAMPLES + 1]: the kind of each example, -1 where there is none."""
    partner: Tensor
    """[rows]: how many rows further the picture is that is the second one here."""

    def to(self, device: torch.device) -> Rows:
        return Rows(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))

    def __getitem__(self, index: int | slice) -> Rows:
        return Rows(*(getattr(self, name)[index] for name in self.__slots__))

    @staticmethod
    def cat(parts: list[Rows]) -> Rows:
        return Rows(*(torch.cat([getattr(part, name) for part in parts]) for name in Rows.__slots__))


@dataclass(slots=True)
class Group:
    """Some pictures and, for each time they are visited, a row for each."""

    crops: Tensor
    """uint8 [crops of all pictures, side, side, 3]."""
    grids: list[tuple[int, int]]
    visits: list[Rows]


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes group number i, always the same one."""

    teacher: Teacher
    first_seed: int
    num_scenes: int
    num_visits: int
    jitter: bool = True
    world: World = TRAINED

    def __call__(self, index: int) -> Group:
        first = self.first_seed + index * self.num_scenes
        return self.of_seeds(range(first, first + self.num_scenes))

    def of_seeds(self, seeds: Iterable[int]) -> Group:
        """A group of the scenes of these seeds."""
        crops, grids = [], []
        rows: list[list[dict[str, np.ndarray]]] = [[] for _ in range(self.num_visits)]
        scenes = [make_scene(seed, self.world) for seed in seeds]
        for index, scene in enumerate(scenes):
            pixels, grid = scene_crops(scene, self.teacher.config.vision)
            crops.append(pixels)
            grids.append(grid)
            for visit in range(self.num_visits):
                partner = (index + 1 + visit) % len(scenes)
                rng = random.Random(f"{scene.seed} {visit}")
                rows[visit].append(self._row(scene, scenes[partner], partner - index, rng))
        visits = [
            Rows(*(torch.from_numpy(np.stack([row[name] for row in part])) for name in Rows.__slots__))
            for part in rows
        ]
        return Group(torch.from_numpy(np.concatenate(crops)), grids, visits)

    def _row(self, scene: Scene, second: Scene, partner: int, rng: random.Random) -> dict[str, np.ndarray]:
        row = Row(self.teacher, rng if self.jitter else None)
        if isinstance(self.teacher, ConversingTeacher):
            has_both, examples = self.teacher.pair_examples((scene, second), rng)
            row.begin_pair(partner, has_both=has_both)
        else:
            examples = self.teacher.examples(scene, rng)
        num_misfits = 0
        for example in examples:
            if not row.add(example):
                num_misfits += 1
                if num_misfits == 3:
                    break
        return row.arrays


class Row:
    """Fills one row with examples."""

    def __init__(self, teacher: Teacher, jitter: random.Random | None) -> None:
        self._teacher = teacher
        self._jitter = jitter
        self._length = 0
        self._count = 0
        self._has_second = False
        self.arrays = _empty(ROW_TOKENS)

    def begin_pair(self, partner: int, *, has_both: bool) -> None:
        """Makes the empty row one of a pair, with the second picture before all examples or only room for it."""
        self.arrays = arrays = _empty(PAIR_ROW_TOKENS)
        arrays["partner"][...] = partner
        self._has_second = has_both
        if has_both:
            self._length = count = self._teacher.config.vision.num_image_tokens
            arrays["patch"][:count] = range(count)
            arrays["position"][:count] = range(1 + count, 1 + 2 * count)
            arrays["example"][:count] = SHARED
            arrays["sees_image"][:count] = True

    def add(self, example: Example) -> bool:
        """Appends an example; returns False where it does not fit any more."""
        config, arrays = self._teacher.config, self.arrays
        ids, num_patches = config.tokenizer, config.vision.num_image_tokens
        prompt = self._teacher.prompt(example.request)
        places = prompt.image_places[: len(example.request.images)]
        sees_image, sees_second = places[:1] == (0,), places == (0, 0)
        within = [place for place in places[1 if sees_image else 0 :] if not sees_second]
        slots: list[Token | None] = [*prompt.tokens, *example.answer]
        ends = [*prompt.answer_ends, len(slots)]
        for place in within:
            slots[place:place] = [None] * num_patches
            ends = [end + num_patches if end > place else end for end in ends]
        if not sees_image:
            slots.insert(0, Token(ids.bos_id))
            ends = [end + 1 for end in ends]
        start, end = self._length, self._length + len(slots)
        if end > len(arrays["ids"]) or self._count + 1 == SHARED or len(within) > (not self._has_second):
            return False
        self._length, self._count = end, self._count + 1
        arrays["ids"][start:end] = [0 if slot is None else slot.id for slot in slots]
        arrays["example"][start:end] = self._count
        first = sum(1 + num_patches if index == 0 else num_patches for index in range(sees_image + sees_second))
        arrays["position"][start:end] = range(first, first + len(slots))
        arrays["sees_image"][start:end] = sees_image
        arrays["sees_second"][start:end] = sees_second
        if within:
            self._has_second = True
            begin = slots.index(None)
            arrays["patch"][start + begin : start + begin + num_patches] = range(num_patches)
        for answer, num_given, end_of_answer in self._learnt(example, ends):
            last = start + end_of_answer
            learnt = slice(last - len(answer) + num_given - 1, last)
            arrays["target"][learnt] = [*answer[num_given:], ids.eos_id]
            arrays["weight"][learnt] = 1 / math.sqrt(len(answer) - num_given + 1)
        arrays["kind"][self._count] = KINDS.index(example.kind)
        self._fill_values(slots, start, len(slots) - len(example.answer))
        return True

    def _learnt(self, example: Example, ends: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """Yields of each answer that is learnt its ids, the number of those that are given, and its end."""
        earlier = [
            message.text for message in getattr(example.request, "messages", ()) if message.role is Role.ASSISTANT
        ]
        for text, is_learnt, end in zip(earlier, example.learnt_turns, ends, strict=False):
            if is_learnt:
                yield self._teacher.tokenizer.encode(text), 0, end
        yield [token.id for token in example.answer], example.num_given, ends[-1]

    def _fill_values(self, tokens: Sequence[Token | None], start: int, num_given: int) -> None:
        config, arrays = self._teacher.config, self.arrays
        for place, token in enumerate(tokens):
            if token is None or not token.value:
                continue
            is_learnt = place >= num_given
            bins = coord_bins(token.value, config.region.coord_out_dim)
            if len(token.value) == 2:
                bins = size_bins(token.value, config.region.size_out_dim // 2)
            if is_learnt and len(token.value) == 2:
                arrays["size_bins"][start + place - 1] = bins
            elif is_learnt:
                arrays["coord_bin"][start + place - 1] = bins[0]
            arrays["values"][start + place, : len(bins)] = self._given(token.value, bins)

    def _given(self, value: tuple[float, ...], bins: list[int]) -> list[float]:
        """What the model is told that a token was worth, which while generating is its own guess."""
        region = self._teacher.config.region
        off = [self._jitter.gauss(0, _INPUT_JITTER / 2) if self._jitter else 0.0 for _ in bins]
        if len(value) == 2:
            last = region.size_out_dim // 2 - 1
            return [
                2 ** (min(last, max(0, round(b + o))) / last * SIZE_OCTAVES - SIZE_OCTAVES)
                for b, o in zip(bins, off, strict=True)
            ]
        last = region.coord_out_dim - 1
        return [min(last, max(0, round(bins[0] + off[0]))) / region.coord_out_dim]


def _empty(num_tokens: int) -> dict[str, np.ndarray]:
    return {
        "ids": np.zeros(num_tokens, np.int16),
        "values": np.zeros((num_tokens, 2), np.float32),
        "example": np.zeros(num_tokens, np.int8),
        "position": np.zeros(num_tokens, np.int16),
        "sees_image": np.zeros(num_tokens, bool),
        "sees_second": np.zeros(num_tokens, bool),
        "patch": np.full(num_tokens, -1, np.int16),
        "target": np.full(num_tokens, -100, np.int16),
        "weight": np.zeros(num_tokens, np.float32),
        "coord_bin": np.full(num_tokens, -1, np.int16),
        "size_bins": np.full((num_tokens, 2), -1, np.int16),
        "kind": np.full(MAX_EXAMPLES + 1, -1, np.int8),
        "partner": np.zeros((), np.int16),
    }


def coord_bins(values: tuple[float, ...], num_bins: int) -> list[int]:
    """Coordinates to the nearest bins."""
    return [min(num_bins - 1, max(0, round(value * num_bins))) for value in values]


def size_bins(values: tuple[float, ...], num_bins: int) -> list[int]:
    """Sizes to the nearest bins of the logarithmic scale."""
    return [
        min(
            num_bins - 1,
            max(0, round((math.log2(max(value, 2**-SIZE_OCTAVES)) / SIZE_OCTAVES + 1) * (num_bins - 1))),
        )
        for value in values
    ]


def scene_crops(scene: Scene, vision: VisionConfig) -> tuple[np.ndarray, tuple[int, int]]:
    """The crops of a scene's picture, drawn no larger than they need, divided as its true size asks for."""
    image = draw_scene(scene, max_area_px=_DRAWN_AREA_PX)
    cropping = MoondreamCropping(vision)
    rows, columns = cropping.select(scene.height_px, scene.width_px)
    size, stride = cropping.crop_px, cropping.stride_px
    pixels = np.empty((1 + rows * columns, size, size, 3), np.uint8)
    pixels[0] = np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))
    whole = (cropping.canvas_px(columns), cropping.canvas_px(rows))
    canvas = np.asarray(image.resize(whole, Image.Resampling.LANCZOS))
    for row in range(rows):
        for column in range(columns):
            top, left = row * stride, column * stride
            pixels[1 + row * columns + column] = canvas[top : top + size, left : left + size]
    return pixels, (rows, columns)
