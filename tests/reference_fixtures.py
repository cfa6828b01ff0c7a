"""The reference fixtures: small models with random weights and the reference implementation's answers.

Two lie in `tests/golden` and are all that a test may rely on. Larger ones lie beside a development checkout;
tests that can use more take `shared_folders()`. Knows where the files are, not what a model does with them.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

CHECKOUT = Path(__file__).resolve().parent.parent
FIXTURES = CHECKOUT / "tests" / "golden"
MD2_SMALL = FIXTURES / "md2-small"
MD3_SMALL = FIXTURES / "md3-small"
SMALL_FOLDERS = (MD2_SMALL, MD3_SMALL)


def shared_folders() -> tuple[Path, ...]:
    """Every reference fixture at hand: those beside the checkout where they exist, else the two small ones."""
    beside = CHECKOUT.parent / "shared" / "golden"
    found = tuple(sorted(folder.parent for folder in beside.glob("*/expected.json")))
    return found or SMALL_FOLDERS


def copy_with_one_image(folder: Path, copy: Path) -> Path:
    """A copy of a folder that asks only for two skills, about its second image alone; returns `copy`."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("conversations.*"))
    answers = expected(copy)
    image = answers["images"][1]
    image["calls"] = [call for call in image["calls"] if call["skill"] in ("query", "point")]
    answers["images"] = [image]
    (copy / "expected.json").write_text(json.dumps(answers), encoding="utf-8")
    tensors = load_file(copy / "expected.safetensors")
    kept = {name.replace("1.", "0.", 1): tensor for name, tensor in tensors.items() if name.startswith("1.")}
    save_file(kept, copy / "expected.safetensors")
    return copy


def shallow_copy(folder: Path, copy: Path) -> Path:
    """A checkpoint without answers that computes far less than the reference model; returns `copy`.

    It has the first two blocks of the image encoder and of the decoder, the second with experts where the model has
    any. Crops have 9 patches a side, so an image has 81 tokens and no more than five crops.
    The weights of the output head are four times as large, else its biases would decide most tokens. For tests that
    compare engines with each other: answers differ by prompt and by image, as those of the reference model do.
    """
    num_blocks, grid_size = 2, 9
    copy.mkdir(parents=True)
    config = model_config(folder)
    config["text"] |= {"n_layers": num_blocks, "max_context": 768, "prefix_attn": 1 + grid_size**2}
    config["vision"] |= {
        "enc_n_layers": num_blocks,
        "crop_size": grid_size * config["vision"]["enc_patch_size"],
        "max_crops": 4,
        "overlap_margin": 1,
    }
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    block = re.compile(r"\.(?:blocks|h)\.(\d+)\.")
    kept: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        found = block.search(name)
        if found is None or int(found[1]) < num_blocks:
            kept[name] = tensor
        if name.endswith((".pos_emb", ".pos_embed")):
            kept[name] = tensor[:, : grid_size**2].contiguous()
        elif name.endswith(("lm_head.weight", "lm_head.linear.weight")):
            kept[name] = 4 * tensor
    save_file(kept, copy / "model.safetensors")
    shutil.copy(folder / "tokenizer.json", copy)
    return copy


def expected(folder: Path) -> dict[str, Any]:
    """What the reference answers for this folder: the parsed `expected.json`."""
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def model_config(folder: Path) -> dict[str, Any]:
    """The model's dimensions and templates: the parsed `config.json`."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def image_paths(folder: Path) -> tuple[Path, ...]:
    """The folder's images, in the order of `expected.json`."""
    return tuple(folder / case["image"] for case in expected(folder)["images"])
