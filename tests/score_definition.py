"""Defines the scores of points and boxes in plain torch, and writes `scores.json` of small checkpoints.

The reference makes no scores. The score of an object is the probability that the model goes on to it where it could
also end, times the probability of the bins within 1/64 of all bins of each that it chose. Builds upon
`tests/conversation_definition.py` and imports nothing of the product. `python -m tests.score_definition FOLDER …`
writes the scores of the calls of `expected.json`; their places must be those of the reference.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tests.conversation_definition import Model, Picture, Run, Sampled

DIGITS = 4
_WITHIN = 64
_SMALLEST_SIZE_OCTAVES = 10
_PLACE_TOLERANCE = 1e-5
_PLACES: Mapping[str, str] = MappingProxyType({"point": "points", "detect": "objects"})
_COORDINATE_HEADS, _SIZE_HEADS = ("coord_decoder",), ("size_decoder", "size_head")


def mass_near(logits: Tensor) -> tuple[int, float]:
    """Returns the most likely bin of logits [bins], and the probability of those within 1/64 of all bins of it."""
    chosen, reach = int(logits.argmax()), len(logits) // _WITHIN
    near = logits.double().softmax(-1)[max(chosen - reach, 0) : chosen + reach + 1]
    return chosen, near.sum().item()


class SizedRun(Run):
    """A sequence whose tokens may also be sizes."""

    def append_size(self, token_id: int, width: float, height: float) -> None:
        """Adds a size."""
        weights = self._model.weights
        features = weights.get("region.size_features")
        if features is None:  # in the layout of training scripts
            features = weights["region.size_features.weight"].T
        angles = 2 * math.pi * (torch.tensor([[width, height]]) @ features)
        row = self._model._linear("region.size_encoder", torch.cat((angles.cos(), angles.sin()), -1))
        self.inputs = torch.cat((self.inputs, row))
        self.sampled.append(Sampled(token_id))


def region_logits(model: Model, names: Sequence[str], hidden: Tensor) -> Tensor:
    """Returns the logits of a region head, which has one of these names, for a hidden state [dim]."""
    if model.config["region"].get("use_ln"):
        hidden = model._norm("region.ln", hidden)
    name = next(
        f"region.{name}" for name in names if any(key.startswith(f"region.{name}.") for key in model.weights)
    )
    return model._mlp(name, hidden) if f"{name}.fc1.weight" in model.weights else model._linear(name, hidden)


@torch.inference_mode()
def found(model: Model, image: str, call: Mapping[str, Any]) -> tuple[list[dict[str, float]], list[float]]:
    """Returns the points or unclipped boxes of a greedy call, and their scores."""
    ids, template = model.config["tokenizer"], model.config["tokenizer"]["templates"][call["skill"]]
    text = model.tokenizer.encode(" " + call["args"]["object"].strip(), add_special_tokens=False).ids
    run = SizedRun(model, [ids["bos_id"], Picture(image), *template["prefix"], *text, *template["suffix"]])
    places: list[dict[str, float]] = []
    scores: list[float] = []
    for _ in range(call["args"]["max_objects"]):
        hidden = run.hidden()[-1]
        logits = model.logits(hidden)
        if logits[ids["eos_id"]] >= logits[ids["coord_id"]]:
            break
        score = torch.sigmoid(logits[ids["coord_id"]].double() - logits[ids["eos_id"]].double()).item()
        centre: list[float] = []
        for _ in "xy":
            bins = region_logits(model, _COORDINATE_HEADS, hidden)
            chosen, mass = mass_near(bins)
            score *= mass
            centre.append(chosen / len(bins))
            run.append(Sampled(ids["coord_id"], centre[-1]))
            hidden = run.hidden()[-1]
        if call["skill"] == "point":
            places.append(dict(zip("xy", centre, strict=True)))
        else:
            sides: list[float] = []
            for bins in region_logits(model, _SIZE_HEADS, hidden).unflatten(-1, (2, -1)):
                chosen, mass = mass_near(bins)
                score *= mass
                sides.append(2 ** (chosen / (len(bins) - 1) * _SMALLEST_SIZE_OCTAVES - _SMALLEST_SIZE_OCTAVES))
            run.append_size(ids["size_id"], *sides)
            (x, y), (width, height) = centre, sides
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            places.append(dict(zip(("x_min", "y_min", "x_max", "y_max"), box, strict=True)))
        scores.append(round(score, DIGITS))
    return places, scores


def same_places(places: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> bool:
    """Returns True if all places are equal but for rounding."""
    return len(places) == len(expected) and all(
        abs(one[name] - other[name]) <= _PLACE_TOLERANCE
        for one, other in zip(places, expected, strict=True)
        for name in other
    )


def write(folder: Path) -> None:
    """Writes the scores of a folder's calls about objects. Raises `ValueError` for places that differ."""
    model, rows = Model(folder), []
    for image in json.loads((folder / "expected.json").read_text(encoding="utf-8"))["images"]:
        for call in image["calls"]:
            if call["skill"] not in _PLACES or "spatial_refs" in call["args"]:
                continue
            places, scores = found(model, image["image"], call)
            if not same_places(places, call["expect"][_PLACES[call["skill"]]]):
                raise ValueError(f"{image['image']} {call}: {places}")
            row = {"image": image["image"], "skill": call["skill"], "args": call["args"], "scores": scores}
            print(f"{folder.name} {row}", flush=True)
            rows.append(f" {json.dumps(row)}")
    (folder / "scores.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        write(Path(each))
