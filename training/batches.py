"""Scenes to arrays: crops of the pictures, and rows of examples that share a picture.

A row holds many examples of one picture one after another; none sees another. Knows the vocabulary and the
vision configuration, no weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.region import SIZE_OCTAVES
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from training.drawing import draw_scene
from training.examples import Example, Teacher
from training.scenes import Scene, make_scene

ROW_TOKENS = 383  # with BOS and 256 image tokens 640, a length that kernels like
MAX_EXAMPLES = 48
_DRAWN_AREA_PX = 430**2
_INPUT_JITTER = 2.0  # bins by which a given coordinate may be off, as generated ones are

KINDS = (
    "count", "color", "shape", "relation", "size", "reading", "presence", "contents", "place", "background",
    "pointed", "arithmetic", "opposite", "counting", "language", "self", "reasoning", "caption short",
    "caption normal", "caption long", "point", "point absent", "detect", "detect absent", "segment",
    "segment absent",
)  # fmt: skip


@dataclass(slots=True)
class Rows:
    """Examples in rows: [rows, ROW_TOKENS] each, `values` and `size_bins` with two columns more."""

    ids: Tensor
    values: Tensor
    """What a coordinate (first column) or size token (both) is worth."""
    example: Tensor
    """Number of the example in its row from 1; 0 is filling."""
    position: Tensor
    sees_image: Tensor
    target: Tensor
    """The next token where it is to be learnt, else -100."""
    weight: Tensor
    coord_bin: Tensor
    """The next coordinate, else -1."""
    size_bins: Tensor
    kind: Tensor
    """[rows, MAX_EXAMPLES + 1]: the kind of each example, -1 where there is none."""

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

    def __call__(self, index: int) -> Group:
        first = self.first_seed + index * self.num_scenes
        return self.of_seeds(range(first, first + self.num_scenes))

    def of_seeds(self, seeds: Iterable[int]) -> Group:
        """A group of the scenes of these seeds."""
        crops, grids = [], []
        rows: list[list[dict[str, np.ndarray]]] = [[] for _ in range(self.num_visits)]
        for seed in seeds:
            scene = make_scene(seed)
            pixels, grid = scene_crops(scene, self.teacher.config.vision)
            crops.append(pixels)
            grids.append(grid)
            for visit in range(self.num_visits):
                rows[visit].append(self._row(scene, random.Random(f"{seed} {visit}")))
        visits = [
            Rows(*(torch.from_numpy(np.stack([row[name] for row in part])) for name in Rows.__slots__))
            for part in rows
        ]
        return Group(torch.from_numpy(np.concatenate(crops)), grids, visits)

    def _row(self, scene: Scene, rng: random.Random) -> dict[str, np.ndarray]:
        row = _Row(self.teacher, rng if self.jitter else None)
        num_misfits = 0
        for example in self.teacher.examples(scene, rng):
            if not row.add(example):
                num_misfits += 1
                if num_misfits == 3:
                    break
        return row.arrays


class _Row:
    """Fills one row with examples."""

    def __init__(self, teacher: Teacher, jitter: random.Random | None) -> None:
        self._teacher = teacher
        self._jitter = jitter
        self._length = 0
        self._count = 0
        shape = (ROW_TOKENS,)
        self.arrays = {
            "ids": np.zeros(shape, np.int16),
            "values": np.zeros((*shape, 2), np.float32),
            "example": np.zeros(shape, np.int8),
            "position": np.zeros(shape, np.int16),
            "sees_image": np.zeros(shape, bool),
            "target": np.full(shape, -100, np.int16),
            "weight": np.zeros(shape, np.float32),
            "coord_bin": np.full(shape, -1, np.int16),
            "size_bins": np.full((*shape, 2), -1, np.int16),
            "kind": np.full(MAX_EXAMPLES + 1, -1, np.int8),
        }

    def add(self, example: Example) -> bool:
        """Append an example; False where it does not fit any more."""
        config, arrays = self._teacher.config, self.arrays
        ids = config.tokenizer
        prompt = self._teacher.prompt(example.request)
        sees_image = bool(example.request.images)
        tokens = (
            [*prompt, *example.answer] if sees_image else [type(prompt[0])(ids.bos_id), *prompt, *example.answer]
        )
        num_given = len(tokens) - len(example.answer)
        start, end = self._length, self._length + len(tokens)
        if end > ROW_TOKENS or self._count == MAX_EXAMPLES:
            return False
        self._length, self._count = end, self._count + 1
        arrays["ids"][start:end] = [token.id for token in tokens]
        arrays["example"][start:end] = self._count
        first = 1 + config.vision.num_image_tokens if sees_image else 0
        arrays["position"][start:end] = range(first, first + len(tokens))
        arrays["sees_image"][start:end] = sees_image
        learnt = slice(start + num_given - 1, end)
        arrays["target"][learnt] = [token.id for token in example.answer] + [ids.eos_id]
        arrays["weight"][learnt] = 1 / math.sqrt(len(example.answer) + 1)
        arrays["kind"][self._count] = KINDS.index(example.kind)
        for place, token in enumerate(tokens):
            if not token.value:
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
        return True

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
