"""Trains an adapter with PEFT on pictures of one's own: questions and the answers that the model should give.

    python training/adapter/with_peft.py examples.jsonl adapters/parts --model moondream-nano

Each line of the file has an example: {"image": "1.png", "question": "Which part is it?", "answer": "part 7"}. Paths
of images are relative to the file. Needs `pip install peft` beside the server's packages. The weights of the model
stay as they are; docs/adapters.md describes the modules, the prompt and the loss.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.errors import CheckpointError, ImageError
from kestrel_runtime.api.requests import Query
from kestrel_runtime.imaging.decoding import MAX_IMAGE_PIXELS, decode_image
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.model import Moondream

TARGET_MODULES = r"model\.text\.blocks\.\d+\.attn\.(qkv|proj)"
"""The decoder's attention. Without `text`, PEFT would also change the image encoder, whose modules have the same
names."""


class Example(NamedTuple):
    """One example, as the model reads it."""

    embeddings: Tensor
    """BOS, the image and the prompt, and the answer without its last token: [T, dim]."""
    answer: Tensor
    """Token ids of the answer, EOS last: int64 [A]. The last A of the T outputs predict them."""
    num_prefix: int
    """BOS and the image, which attend to each other in both directions."""


class Decoder(nn.Module):
    """Scores answers. PEFT names modules by their attributes, so `model` must have the name it has here."""

    def __init__(self, model: Moondream) -> None:
        super().__init__()
        self.model = model

    def forward(self, example: Example) -> Tensor:
        """The logits that predict the answer: [A, vocabulary]. Tokens of image and prompt have no loss."""
        length = len(example.embeddings)
        positions = torch.arange(length, device=example.embeddings.device)
        sees = positions[:, None] >= positions
        sees[: example.num_prefix, : example.num_prefix] = True
        hidden = self.model.text(example.embeddings, positions, _attention(sees))
        return self.model.text.logits(hidden[-len(example.answer) :])


def _attention(sees: Tensor) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))  # [1, heads, T, D]
        return scaled_dot_product_attention(*heads, attn_mask=sees, enable_gqa=True)[0].transpose(0, 1)

    return attend


@torch.no_grad()
def prepared(loaded: LoadedModel, image: bytes, question: str, answer: str) -> Example:
    """An example from an image file and texts. The image encoder is frozen, so each image is encoded once.

    Raises `ImageError`, and `InvalidRequest` for a question that the server would refuse.
    """
    model: Moondream = loaded.model
    config, tokenizer = model.config, loaded.tokenizer
    crops = loaded.family.cropping(config).make_crops(decode_image(image, max_image_pixels=MAX_IMAGE_PIXELS))
    pixels = torch.from_numpy(crops.pixels).to(model.device)
    seen = model.vision.project(model.vision.encode(pixels), crops.rows, crops.columns)
    skill = loaded.family.skills(config)["query"]
    prompt = skill.prompt(Query(image=image, question=question), tokenizer, config)
    ids = [*tokenizer.encode(answer), config.tokenizer.eos_id]
    text = [*(token.id for token in prompt.tokens), *ids[:-1]]
    embedded = model.text.wte[torch.tensor([config.tokenizer.bos_id, *text], device=model.device)]
    embeddings = torch.cat((embedded[:1], seen.to(embedded), embedded[1:]))
    return Example(embeddings, torch.tensor(ids, device=model.device), 1 + len(seen))


def train(decoder: nn.Module, examples: list[Example], steps: int, rate: float, seed: int) -> None:
    """Minimise the cross entropy of the answers, one example a step, each as often as the others."""
    parameters = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    chance, order = random.Random(seed), list[Example]()
    recent: list[float] = []
    for step in range(1, steps + 1):
        order = order or chance.sample(examples, len(examples))
        example = order.pop()
        optimizer.param_groups[0]["lr"] = rate * (1 - (step - 1) / steps)
        loss = cross_entropy(decoder(example).float(), example.answer)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent, loss.item()][-len(examples) :]
        if step % 20 == 0 or step == steps:
            print(f"step {step} of {steps}, loss {sum(recent) / len(recent):.4f}", flush=True)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Train an adapter of a Moondream with PEFT.")
    parser.add_argument("examples", type=Path, help="JSON lines with image, question and answer")
    parser.add_argument("output", type=Path, help="folder to write; its name is the name of the adapter")
    parser.add_argument("--model", default=BUILT_IN_MODEL, help="as of `kestrel-grpc serve` (%(default)s)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (the GPU if there is one)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the matrices (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="one example each (%(default)s)")
    parser.add_argument("--rate", type=float, default=2e-3, help="of AdamW at the start (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first weights and of the order (%(default)s)")
    arguments = parser.parse_args()
    try:
        from peft import LoraConfig, get_peft_model  # its users install it
    except ImportError as error:
        print(f"{error}; run: pip install peft", file=sys.stderr)
        return 1
    started = time.monotonic()
    try:
        loaded = LoadedModel.load(EngineConfig(model=arguments.model, device=arguments.device))
        examples = _read(loaded, arguments.examples)
    except (CheckpointError, ImageError, OSError, ValueError) as error:
        print(f"{arguments.examples}: {error}", file=sys.stderr)
        return 1
    torch.manual_seed(arguments.seed)
    # Matrices are kept in float32: small steps would be lost in bfloat16.
    lora = LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=TARGET_MODULES)
    decoder: Any = get_peft_model(Decoder(loaded.model), lora, autocast_adapter_dtype=True)
    decoder.print_trainable_parameters()
    train(decoder, examples, arguments.steps, arguments.rate, arguments.seed)
    decoder.save_pretrained(arguments.output)
    print(f"{arguments.output}: {len(examples)} examples, {time.monotonic() - started:.0f} s")
    return 0


def _read(loaded: LoadedModel, file: Path) -> list[Example]:
    """Raises ValueError for a line that is no example, OSError and `ImageError` for an image."""
    examples: list[Example] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found = json.loads(line)
            image, question, answer = (str(found[name]) for name in ("image", "question", "answer"))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} needs image, question and answer, as JSON") from error
        examples.append(prepared(loaded, (file.parent / image).read_bytes(), question, answer))
    if not examples:
        raise ValueError("has no examples")
    return examples


if __name__ == "__main__":
    sys.exit(main())
