"""Acceptance of a checkpoint: runs every case of a golden folder and says which hold.

A golden folder holds a small checkpoint, images, and the reference implementation's answers in `expected.json`
and `expected.safetensors`. In float32 every number and every answer is compared; in a shorter type only the
numbers are, since one rounding may turn a greedy answer of a random model.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from kestrel_runtime.config import EngineConfig
from kestrel_runtime.culprits import Culprits
from kestrel_runtime.engine import Engine
from kestrel_runtime.errors import CheckpointError, KestrelError
from kestrel_runtime.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    Location,
    Output,
    PointOutput,
    QueryOutput,
)
from kestrel_runtime.fast_paths import FastPaths
from kestrel_runtime.images import decode_image, make_crops
from kestrel_runtime.loading import LoadedModel
from kestrel_runtime.pages import PagePool
from kestrel_runtime.preprocess import Preprocessor
from kestrel_runtime.requests import (
    BoxRef,
    Caption,
    Detect,
    Point,
    PointRef,
    Query,
    Request,
    SamplingParams,
    Segment,
    SpatialRef,
)
from kestrel_runtime.runner import ModelRunner
from kestrel_runtime.scheduler import Scheduler
from kestrel_runtime.sequence import SequenceClock
from kestrel_runtime.step_bounds import StepBounds

_COORDINATE_TOLERANCE = 1e-5
_HIDDEN_TOLERANCE = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 6e-2, "float8": 3e-1}
"""Largest error of embeddings, hidden states, keys and values, relative to the tensor's largest value."""
_LOGIT_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 3e-1, "float8": 3.0}
"""Largest absolute error of a logit, where the largest logits are about 10. In float8 the plain definitions of the
operations are off by up to 2.2: a quarter of the logits' standard deviation, and the worst of 1,536."""
_LOGIT_TOLERANCE_WITH_EXPERTS = {"float32": 1e-3, "float16": 3e-1, "bfloat16": 1.8, "float8": 6.0}
"""Of a mixture of experts, where rounding may turn a near tie and so choose another expert."""
_KV_FRACTION = 0.02
"""Of free memory: the prompts are few, and several folders may be checked side by side."""
_EXPERTS_FACTOR = 3
"""So much more the other tensors of a mixture of experts may be off where numbers are rounded."""


class GoldenFolder:
    """One folder of cases, loaded; `run` goes through them."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Load the checkpoint, for the device, types and paths of `config`.

        Raises `CheckpointError` where the folder is not a golden one.
        """
        try:
            self._expected = json.loads((folder / "expected.json").read_text())
            self._tensors = load_file(folder / "expected.safetensors")
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} is no golden folder: {Path(error.filename).name} is missing") from None
        self._folder = folder
        self._config = replace(
            config,
            model=str(folder),
            kv_fraction=_KV_FRACTION,
            max_queued_requests=len(self._expected["images"]) * 100 + 100,
        )
        self._loaded = LoadedModel.load(self._config)
        types = (config.text_path, config.vision_path, config.kv_dtype)
        is_float8 = any(name.endswith("float8") for name in types)
        self._precision = "float8" if is_float8 else str(self._loaded.model.dtype).removeprefix("torch.")

    def run(self, print_line: Callable[[str], None]) -> tuple[int, int]:
        """Print a line per case; returns how many passed and how many failed."""
        num_passed = num_failed = 0
        for name, complaint in self._cases():
            print_line(f"ok      {name}" if complaint is None else f"FAILED  {name}: {complaint}")
            num_passed += complaint is None
            num_failed += complaint is not None
        return num_passed, num_failed

    def _cases(self) -> Iterator[tuple[str, str | None]]:
        for index, image in enumerate(self._expected["images"]):
            yield from self._image_cases(index, image)
        if self._precision == "float32":
            yield from asyncio.run(self._call_cases())

    def _image_cases(self, index: int, expected: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
        name = expected["image"]
        data = (self._folder / name).read_bytes()
        image = decode_image(data, max_image_pixels=self._config.max_image_pixels)
        crops = make_crops(image, self._loaded.model.config.vision)
        shape = [[crops.rows, crops.columns], crops.num_crops]
        yield f"{name} tiling", _differs(shape, [expected["tiling"], expected["n_crops"]])
        for key, place in (("global_crop_u8", 0), ("last_crop_u8", -1)):
            if (pixels := self._tensors.get(f"{index}.{key}")) is not None:
                equal = np.array_equal(pixels.numpy(), crops.pixels[place])
                yield f"{name} {key}", None if equal else "pixels differ"
        yield from self._prompt_cases(index, expected, data)

    def _prompt_cases(self, index: int, expected: dict[str, Any], data: bytes) -> Iterator[tuple[str, str | None]]:
        name, call = expected["image"], next(c for c in expected["calls"] if c["skill"] == "query")
        probe = _Probe(self._loaded, self._config, Query(call["args"]["question"], data))
        ids = [token.id for token in probe.sequence.tokens[1:]]
        yield f"{name} query_prompt_tokens", _differs(ids, expected["query_prompt_tokens"])
        has_experts = self._loaded.model.config.text.moe is not None
        factor = _EXPERTS_FACTOR if has_experts and self._precision != "float32" else 1
        relative = factor * _HIDDEN_TOLERANCE[self._precision]
        absolute = (_LOGIT_TOLERANCE_WITH_EXPERTS if has_experts else _LOGIT_TOLERANCE)[self._precision]
        for key, actual in probe.tensors():
            if (tensor := self._tensors.get(f"{index}.{key}")) is None:
                continue
            if key == "query_prompt_logits":
                yield f"{name} {key}", _too_far(actual, tensor, absolute)
            else:
                yield f"{name} {key}", _too_far(actual, tensor, relative * tensor.abs().max().item())

    async def _call_cases(self) -> list[tuple[str, str | None]]:
        engine = Engine(self._loaded, self._config)
        try:
            calls = [(image["image"], call) for image in self._expected["images"] for call in image["calls"]]
            calls += [(None, call) for call in self._expected.get("text_only", [])]
            return await asyncio.gather(*(self._call_case(engine, image, call) for image, call in calls))
        finally:
            engine.close()

    async def _call_case(self, engine: Engine, image: str | None, call: dict[str, Any]) -> tuple[str, str | None]:
        data = None if image is None else (self._folder / image).read_bytes()
        arguments = ", ".join(f"{key}={value!r}" for key, value in call["args"].items())
        name = f"{image or 'no image'} {call['skill']}({arguments})"
        try:
            finished = await engine.submit(_request(call, data, self._expected["max_tokens"])).result()
        except KestrelError as error:
            return name, f"{type(error).__name__}: {error}"
        return name, _answer_differs(_plain(finished.output), call["expect"])


class _Probe:
    """One prompt taken through the runner step by step, to look at the tensors on the way."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, request: Request) -> None:
        self._model = loaded.model
        self._cache = loaded.new_cache(config)
        pages = PagePool(self._cache.num_pages, config.page_size)
        preprocessor = Preprocessor(
            loaded.model.config,
            loaded.tokenizer,
            Culprits(),
            max_context=loaded.model.config.text.max_context,
            max_image_pixels=config.max_image_pixels,
            num_threads=1,
        )
        self.sequence = preprocessor.prepare(request, SequenceClock(submitted=time.monotonic()))
        preprocessor.close()
        bounds = StepBounds(max_batch_size=1, max_prefill_tokens=self.sequence.length, max_crops=1)
        scheduler = Scheduler(
            pages,
            max_batch_size=bounds.max_batch_size,
            max_prefill_tokens=bounds.max_prefill_tokens,
            max_crops_per_step=bounds.max_crops,
        )
        scheduler.add(self.sequence)
        paths = FastPaths.of(config, loaded.model.device.type, loaded.model)
        self._runner = ModelRunner(loaded.model, self._cache, paths, bounds)
        self._batch = scheduler.next_batch(now=0.0)

    @torch.inference_mode()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that golden folders know, by name, in float32 on the CPU."""
        hidden = self._runner.last_hidden(self._batch)
        named = {
            "image_embeddings_every_9th": self._runner.image_embeddings(self.sequence)[::9],
            "query_prompt_last_hidden": hidden[-1],
            "query_prompt_logits": self._model.text.logits(hidden.to(self._model.dtype))[-1],
        }
        prefix = self.sequence.prefix_length
        for letter, pages in (("k", self._cache.key_pages), ("v", self._cache.value_pages)):
            rows = pages[-1, self.sequence.pages].transpose(0, 1).flatten(1, 2)[:, :prefix]  # [heads, prefix, dim]
            if letter == "k":
                rows = _interleaved(rows, self._model.config.text.rotary_dim)
            named[f"last_layer_{letter}_first8"] = rows[:, :8]
            named[f"last_layer_{letter}_last8"] = rows[:, -8:]
        for name, tensor in named.items():
            yield name, tensor.float().cpu()


def _interleaved(keys: Tensor, rotary_dim: int) -> Tensor:
    # The reference stores lanes 0, R/2, 1, R/2 + 1 … where this engine keeps both halves in place.
    pairs = keys[..., :rotary_dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, keys[..., rotary_dim:]), dim=-1)


def _request(call: dict[str, Any], data: bytes | None, max_tokens: int) -> Request:
    args, greedy = call["args"], SamplingParams(temperature=0.0, max_tokens=max_tokens)
    refs = tuple(_spatial_ref(ref) for ref in args.get("spatial_refs", ()))
    if call["skill"] == "query":
        return Query(args["question"], data, args["reasoning"], refs, greedy)
    assert data is not None, "only queries go without an image"
    if call["skill"] == "caption":
        return Caption(data, args["length"], greedy)
    kinds = {"point": Point, "detect": Detect, "segment": Segment}
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens if call["skill"] == "segment" else None)
    return kinds[call["skill"]](args["object"], data, args.get("max_objects"), refs, sampling)


def _spatial_ref(sides: list[float]) -> SpatialRef:
    return PointRef(*sides) if len(sides) == 2 else BoxRef(*sides)


def _plain(output: Output) -> dict[str, Any]:
    """An output in the words of `expected.json`."""
    if isinstance(output, QueryOutput):
        plain: dict[str, Any] = {"answer": output.answer}
        if output.reasoning is not None:
            grounding = [
                {
                    "start_idx": item.start_char,
                    "end_idx": item.end_char,
                    "points": [[p.x, p.y] for p in item.points],
                }
                for item in output.reasoning.groundings
            ]
            plain["reasoning"] = {"text": output.reasoning.text, "grounding": grounding}
        return plain
    if isinstance(output, CaptionOutput):
        return {"caption": output.caption}
    if isinstance(output, PointOutput):
        return {"points": [_sides(point) for point in output.points]}
    if isinstance(output, DetectOutput):
        return {"objects": [_sides(box) for box in output.boxes]}
    return {"segments": [{"svg_path": item.svg_path, "bbox": _sides(item.box)} for item in output.segments]}


def _sides(place: Location | Box) -> dict[str, float]:
    return {name: getattr(place, name) for name in type(place).__slots__}


def _answer_differs(actual: Any, expected: Any) -> str | None:
    same = _matches(actual, expected)
    return None if same else f"expected {json.dumps(expected)}, got {json.dumps(actual)}"


def _matches(actual: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and actual.keys() == expected.keys()
            and all(_matches(actual[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_matches, actual, expected))
    if isinstance(expected, float):  # the reference leaves boxes unclipped
        return abs(actual - min(max(expected, 0.0), 1.0)) <= _COORDINATE_TOLERANCE
    return actual == expected


def _differs(actual: Any, expected: Any) -> str | None:
    return None if actual == expected else f"expected {expected}, got {actual}"


def _too_far(actual: Tensor, expected: Tensor, tolerance: float) -> str | None:
    if actual.shape != expected.shape:
        return f"expected shape {list(expected.shape)}, got {list(actual.shape)}"
    error = (actual - expected).abs().max().item()
    return None if error <= tolerance else f"off by {error:.2e}, tolerance {tolerance:.2e}"
