"""How far are a path's cached keys and values from those of the plain path in float32, layer by layer?

Takes one prompt through both, and after it the same few tokens, one decode step each: those that the plain path
draws. Prints for each layer the relative error of its keys and values, that of the decoded positions alone, and
where the largest error lies, and names the first layer above the tolerance, which is where to look for a fault.
The image comes before layer 0: an error there with `vision-path` fast is the encoder's, unless it stays with
`--set vision-path=plain`.

    python -m bench.inspect_kv --model /tmp/md2 --set text-path=fused-float8
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from bench.harness.engine_options import add_engine_options, engine_config
from bench.harness.report import write_json
from bench.harness.serving import machine_facts
from bench.harness.workload import QUESTIONS, chart
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun
from kestrel_runtime.models.verification import plain_float32
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.verify.preparing import preparing

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2, "float8": 2e-1}
)
"""Largest relative error of a layer, by the shortest type that computes or holds it."""
NO_IMAGE = "-"

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values by layer, each [heads, positions, head dimension]."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Where in a sequence the prompt's image and the decoded tokens are."""

    prefix_length: int
    num_prompt: int

    def name(self, position: int) -> str:
        """The part of a position, and its place in it."""
        if position < self.prefix_length:
            return f"image {position}"
        if position < self.num_prompt:
            return f"prompt {position - self.prefix_length}"
        return f"decoded {position - self.num_prompt}"


@dataclass(frozen=True, slots=True)
class Error:
    """How far keys or values of a layer are off."""

    relative: float
    """‖got - wanted‖ / ‖wanted‖."""
    relative_decoded: float
    """The same of decoded positions alone; 0 where there are none."""
    largest: float
    """Of one number."""
    largest_at: str


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far a layer is off."""

    layer: int
    keys: Error
    values: Error

    def exceeds(self, tolerance: float) -> bool:
        """Whether keys or values are further off than they may be, or are no numbers."""
        errors = (
            self.keys.relative,
            self.keys.relative_decoded,
            self.values.relative,
            self.values.relative_decoded,
        )
        return not all(error <= tolerance for error in errors)


@dataclass(frozen=True, slots=True)
class Run:
    """What a path leaves in the cache, and draws on the way."""

    layers: Layers
    drawn: list[Token]
    parts: Parts
    precision: str


def run(config: EngineConfig, request: Query, num_tokens: int, forced: Sequence[Token] = ()) -> Run:
    """Take `request` and `num_tokens` tokens after it through a path: those `forced`, or else what it draws."""
    loaded = LoadedModel.load(config)
    with preparing(loaded, config) as prepare:
        prompt = PromptRun(loaded.model, config, prepare)
        prompt.begin(request)
    drawn = [prompt.prefill()]
    parts = Parts(prompt.sequence.prefix_length, prompt.sequence.num_cached)
    for place in range(num_tokens):
        drawn.append(prompt.decode(forced[place] if forced else drawn[-1]))
    layers = [prompt.cached(layer) for layer in range(loaded.model.config.text.n_layers)]
    types = (config.text_path, config.vision_path, config.kv_dtype)
    is_float8 = any(name.endswith("float8") for name in types)
    return Run(layers, drawn, parts, "float8" if is_float8 else str(loaded.model.dtype).removeprefix("torch."))


def compare(wanted: Layers, got: Layers, parts: Parts) -> list[LayerError]:
    """The errors of `got`, layer by layer."""
    return [
        LayerError(layer, *(_error(ours, theirs, parts) for theirs, ours in zip(*both, strict=True)))
        for layer, both in enumerate(zip(wanted, got, strict=True))
    ]


def _error(got: Tensor, wanted: Tensor, parts: Parts) -> Error:
    difference = (got.double() - wanted.double()).abs()
    by_position = difference.amax(dim=(0, 2))
    largest_at = int(by_position.argmax())  # the first that is no number, if there is one
    decoded = slice(parts.num_prompt, None)
    return Error(
        _relative(difference, wanted),
        _relative(difference[:, decoded], wanted[:, decoded]),
        by_position[largest_at].item(),
        parts.name(largest_at),
    )


def _relative(difference: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    return (difference.norm() / wanted.double().norm().clamp_min(torch.finfo(torch.float64).tiny)).item()


def print_errors(errors: Sequence[LayerError], tolerance: float) -> None:
    """A row per layer; those above the tolerance are marked."""
    columns = f"{'relative':>9} {'decoded':>9} {'largest':>9} {'at':<12}"
    print(f"{'':<6}{'keys':<42} {'values':<42}\n{'layer':<6}{columns} {columns}")
    for row in errors:
        cells = " ".join(
            f"{error.relative:>9.2e} {error.relative_decoded:>9.2e} {error.largest:>9.2e} {error.largest_at:<12}"
            for error in (row.keys, row.values)
        )
        print(f"{row.layer:<6}{cells}{' <' if row.exceeds(tolerance) else ''}".rstrip())


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(result)
    result.add_argument("--prompt", default=QUESTIONS[0], help="the question (%(default)s)")
    result.add_argument("--image", help=f"a file, or {NO_IMAGE} for none (default: a chart of our own)")
    result.add_argument("--tokens", type=int, default=4, help="to decode after the prompt (%(default)s)")
    result.add_argument(
        "--tolerance",
        type=float,
        help="largest relative error of a layer (default: "
        + ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items())
        + ")",
    )
    result.add_argument(
        "--json",
        type=Path,
        default=Path(os.environ.get("OUT", "bench/out")) / "inspect_kv.json",
        help="%(default)s",
    )
    return result


def main() -> int:
    """Compare, print the table, write the JSON; 1 if a layer is above the tolerance."""
    options = parser()
    arguments = options.parse_args()
    config = engine_config(options, arguments)
    image = chart(0) if arguments.image is None else None
    if arguments.image not in (None, NO_IMAGE):
        image = Path(arguments.image).read_bytes()
    request = Query(arguments.prompt, image, sampling=SamplingParams(temperature=0.0))
    plain = run(plain_float32(config), request, arguments.tokens)
    chosen = run(config, request, arguments.tokens, plain.drawn)
    tolerance = TOLERANCES[chosen.precision] if arguments.tolerance is None else arguments.tolerance
    errors = compare(plain.layers, chosen.layers, plain.parts)
    print_errors(errors, tolerance)
    first = next((row.layer for row in errors if row.exceeds(tolerance)), None)
    same = sum(ours == theirs for ours, theirs in zip(chosen.drawn, plain.drawn, strict=True))
    print(f"\n{same} of {len(plain.drawn)} tokens drawn as the plain path draws them")
    print(
        f"{'no layer' if first is None else f'layer {first} is the first'} above {tolerance:g} ({chosen.precision})"
    )
    write_json(
        arguments.json,
        {
            "machine": machine_facts(),
            "model": arguments.model,
            "set": arguments.set,
            "precision": chosen.precision,
            "tolerance": tolerance,
            "first_layer_above": first,
            "tokens_alike": same,
            "tokens": len(plain.drawn),
            "layers": [asdict(row) for row in errors],
        },
    )
    return 0 if first is None else 1


if __name__ == "__main__":
    sys.exit(main())
