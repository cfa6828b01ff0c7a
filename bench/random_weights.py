"""Full-size Moondreams of random weights: as fast and as large as the published ones, and free of any download.

Weights are normal with a deviation of 0.02, norms are 1 and 0, so that nothing overflows; the end of an answer is
out of reach, so that answers are exactly as long as asked. Made on the GPU in seconds. Moondream 2 and 3 have the
hub's layout, Moondream 3 with float8 experts has the training layout, as it is published.

    python -m bench.random_weights moondream2 /tmp/md2
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.harness.checkpoints import END_BIAS, training_name, write_tokenizer
from bench.harness.output import parser_of
from bench.harness.workload import vocabulary
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.weights.checkpoint import expected_tensors
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2, PUBLISHED, infer_config

DEVIATION = 0.02
KV_SCALE = 0.02
"""Scale of each layer's keys and values where they are kept in float8: theirs deviate by about 1."""
_FP8_DEVIATION = 64.0
_FP8_LARGEST = 448.0


def write_random_model(
    folder: Path, config: MoondreamConfig, device: torch.device, *, fp8_experts: bool = False, seed: int = 1
) -> None:
    """Write `config.json`, `tokenizer.json` and one weights file, bfloat16 but for float8 experts and scales."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = expected_tensors(config, fp8_experts=fp8_experts)
    (folder / "config.json").write_text(json.dumps(infer_config(shapes), indent=1))
    write_tokenizer(folder / "tokenizer.json", config.text.vocab_size, vocabulary())
    tensors = dict(_tensors(shapes, device, seed))
    if fp8_experts:
        tensors = {training_name(name, tensor): tensor for name, tensor in tensors.items()}
        tensors.update(kv_scales(config.text.n_layers))
    else:
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def kv_scales(num_layers: int) -> dict[str, Tensor]:
    """The scales of a float8 cache of keys and values, by their published names."""
    return {
        f"text_model.transformer.h.{layer}.kv_quantizer.{part}_scale": torch.tensor(KV_SCALE)
        for layer in range(num_layers)
        for part in "kv"
    }


def _tensors(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device, seed: int
) -> Iterator[tuple[str, Tensor]]:
    chance = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(".scale"):
            yield name, torch.full(shape, DEVIATION / _FP8_DEVIATION)
            continue
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if re.search(r"(^|[._])ln[12]?\.", name):
            drawn.fill_(1.0 if name.endswith(".weight") else 0.0)
        elif name.endswith(".weight") and f"{name.removesuffix('weight')}scale" in shapes:
            drawn = drawn.normal_(0.0, _FP8_DEVIATION, generator=chance).clamp_(-_FP8_LARGEST, _FP8_LARGEST)
            drawn = drawn.to(torch.float8_e4m3fn)
        else:
            drawn.normal_(0.0, DEVIATION, generator=chance)
        if name == "text.lm_head.bias":
            drawn[MOONDREAM_2.tokenizer.eos_id] = END_BIAS
        # Features of places stand the other way round in the training layout, with which float8 experts come.
        is_turned = name in ("region.coord_features", "region.size_features") and _has_scales(shapes)
        yield name, (drawn.T if is_turned else drawn).contiguous().cpu()


def _has_scales(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return any(name.endswith(".scale") for name in shapes)


def main() -> int:
    """Write one model."""
    parser = parser_of(__doc__)
    parser.add_argument("model", choices=PUBLISHED)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    config, fp8_experts = PUBLISHED[arguments.model]
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_random_model(arguments.folder, config, device, fp8_experts=fp8_experts)
    size = sum(file.stat().st_size for file in arguments.folder.iterdir())
    print(f"{arguments.folder}: {size / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
