"""Defines the answer of a conversation with pictures in plain torch, and writes the fixtures `conversations.json`.

Imports nothing of the product: it is written from the layout of the makers' engine and the published architecture
of Moondream 2 and 3. It computes each token from the whole sequence, without a cache, pages or chunks.

    python tests/conversation_definition.py check tests/golden/md2-small   # with the reference's single pictures
    python tests/conversation_definition.py write tests/golden/md2-small   # answers conversations without `expect`

**Layout.** BOS; for each message of the user its pictures, the prefix of a query and its text; for each message of
the assistant the opener of an answer and its text; the last opener, of an answer or of reasoning. No end token
divides turns. Leading system messages precede the first text of the user, with an empty line after each.

**Attention.** The positions of a picture attend to each other, everything else is causal. BOS belongs to the first
picture if that picture follows it directly.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

EVERY = 9
"""The step between the rows and logits that fixtures contain."""
CONVERSATIONS = "conversations.json"
TENSORS = "conversations.safetensors"
_HIDDEN_TOLERANCE, _LOGIT_TOLERANCE = 2e-4, 1e-3


@dataclass(frozen=True, slots=True)
class Picture:
    """The place of a picture in a sequence; `name` is its file's."""

    name: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token: its id and, for a coordinate, its value."""

    id: int
    value: float | None = None


@dataclass(slots=True)
class Answer:
    """What the model answers greedily."""

    tokens: list[Sampled]
    """All tokens after the prompt, with the one that begins an answer after reasoning."""
    expect: dict[str, Any]
    """The answer in the form of `expected.json`."""
    hidden: Tensor
    """The last block's output at the prompt's last position, [dim]."""
    logits: Tensor
    """The logits of the first token, [vocabulary]."""
    margin: float
    """The smallest distance of a chosen logit to the next one."""


# Names of tensors ------------------------------------------------------------------------------------

_TRAINING_NAMES = (
    (r"^text_model\.transformer\.embd\.wte\.weight$", "text.wte"),
    (r"^text_model\.lm_head\.ln\.", "text.post_ln."),
    (r"^text_model\.lm_head\.linear\.", "text.lm_head."),
    (r"^text_model\.transformer\.h\.", "text.blocks."),
    (r"\.mixer\.Wqkv\.", ".attn.qkv."),
    (r"\.mixer\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.experts\.weight$", ".mlp.fc1.weight"),
    (r"\.mlp\.output_experts\.weight$", ".mlp.fc2.weight"),
    (r"\.gate\.", ".mlp.router."),
    (r"\.moe_quant\.up_scale$", ".mlp.fc1.scale"),
    (r"\.moe_quant\.down_scale$", ".mlp.fc2.scale"),
    (r"\.tau_(wq|wv|alpha)$", r".attn.tau.\1"),
    (r"^vision_encoder\.encoder\.model\.visual\.patch_embed\.linear\.", "vision.patch_emb."),
    (r"^vision_encoder\.encoder\.model\.visual\.pos_embed$", "vision.pos_emb"),
    (r"^vision_encoder\.encoder\.model\.visual\.norm\.", "vision.post_ln."),
    (r"^vision_encoder\.encoder\.model\.visual\.blocks\.(\d+)\.norm", r"vision.blocks.\1.ln"),
    (r"^vision_encoder\.encoder\.model\.visual\.", "vision."),
    (r"^vision_encoder\.projection\.mlp\.", "vision.proj_mlp."),
    (r"^region_model\.coordinate_encoder\.", "region.coord_encoder."),
    (r"^region_model\.coordinate_head\.", "region.coord_decoder."),
    (r"^region_model\.coordinate_features\.weight$", "region.coord_features"),
    (r"^region_model\.", "region."),
    (r"^model\.", ""),
)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Returns the float32 tensors of a checkpoint in either layout, named as on the hub without `model.`."""
    named: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        short = name
        for pattern, replacement in _TRAINING_NAMES:
            short = re.sub(pattern, replacement, short)
        transposed = name.startswith("region_model.") and short == "region.coord_features"
        named[short] = tensor.float().T if transposed else tensor.float()
    for name in [name for name in named if name.endswith(".scale")]:
        scale = named.pop(name)
        named[name.removesuffix("scale") + "weight"] *= scale[..., None]
    return named


# The model -------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A checkpoint's folder with its tensors."""

    folder: Path
    config: dict[str, Any] = field(init=False)
    weights: dict[str, Tensor] = field(init=False)
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.weights = read_weights(self.folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.image_embeddings = cache(self._image_embeddings)

    @property
    def is_second(self) -> bool:
        """Whether it is a Moondream 2."""
        return not self.config["text"].get("tau_attn")

    # Parts that several layers share.

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        inner = functional.gelu(self._linear(f"{name}.fc1", x), approximate="tanh")
        return self._linear(f"{name}.fc2", inner)

    # Vision.

    def tiling(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of the crops of a picture."""
        vision = self.config["vision"]
        margins = 2 * vision["overlap_margin"] * vision["enc_patch_size"]
        window, most = vision["crop_size"] - margins, vision["max_crops"]
        high, wide = max(1, height - margins), max(1, width - margins)
        if high <= window or wide <= window:
            return 1, 1
        rows, columns = math.ceil(high / window), math.ceil(wide / window)
        if rows * columns > most:
            ratio = math.sqrt(most / (rows * columns))
            return max(1, math.floor(rows * ratio)), max(1, math.floor(columns * ratio))
        rows = max(math.floor(math.sqrt(most * high / wide)), rows)
        columns = max(math.floor(math.sqrt(most * wide / high)), columns)
        if rows * columns > most:
            if columns > rows:
                columns = most // rows
            else:
                rows = most // columns
        return max(1, rows), max(1, columns)

    def crops(self, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Returns the crops [1 + rows × columns, 3, side, side], the whole picture first, and (rows, columns)."""
        vision = self.config["vision"]
        side, margins = vision["crop_size"], 2 * vision["overlap_margin"] * vision["enc_patch_size"]
        window = side - margins
        rows, columns = self.tiling(*image.size)
        lanczos = Image.Resampling.LANCZOS
        canvas = np.asarray(image.resize((columns * window + margins, rows * window + margins), lanczos))
        pixels = [np.asarray(image.resize((side, side), lanczos))]
        for row in range(rows):
            for column in range(columns):
                top, left = row * window, column * window
                pixels.append(canvas[top : top + side, left : left + side])
        scaled = torch.from_numpy(np.stack(pixels)).float() / 255
        return ((scaled - 0.5) / 0.5).permute(0, 3, 1, 2), (rows, columns)

    def encode_crops(self, crops: Tensor) -> Tensor:
        """Returns the features [crops, patches a side, patches a side, width] of crops."""
        vision = self.config["vision"]
        patch, side = vision["enc_patch_size"], vision["crop_size"] // vision["enc_patch_size"]
        # A patch is a vector of its channels, in each its rows, in each its columns.
        patches = crops.unflatten(3, (side, patch)).unflatten(2, (side, patch))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self._linear("vision.patch_emb", patches) + self.weights["vision.pos_emb"]
        for number in range(vision["enc_n_layers"]):
            block = f"vision.blocks.{number}"
            qkv = self._linear(f"{block}.attn.qkv", self._norm(f"{block}.ln1", x))
            q, k, v = (part.unflatten(-1, (vision["enc_n_heads"], -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
            x = x + self._linear(f"{block}.attn.proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + self._mlp(f"{block}.mlp", self._norm(f"{block}.ln2", x))
        return self._norm("vision.post_ln", x).unflatten(1, (side, side))

    def reconstruct(self, grids: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the features of the whole from those of its overlapping crops.

        Each place is taken from the crop whose inner part it belongs to; margins count at the edges of the picture.
        """
        margin, side = self.config["vision"]["overlap_margin"], grids.shape[1]
        lines = []
        for row in range(rows):
            top, bottom = (0 if row == 0 else margin), (side if row == rows - 1 else side - margin)
            line = []
            for column in range(columns):
                left, right = (0 if column == 0 else margin), (side if column == columns - 1 else side - margin)
                line.append(grids[row * columns + column, top:bottom, left:right])
            lines.append(torch.cat(line, dim=1))
        return torch.cat(lines, dim=0)

    def _image_embeddings(self, name: str) -> Tensor:
        """Returns the embeddings [positions, dim] of a picture of the folder."""
        with Image.open(self.folder / name) as file:
            crops, (rows, columns) = self.crops(file.convert("RGB"))
        features = self.encode_crops(crops)
        whole = self.reconstruct(features[1:], rows, columns)
        pooled = functional.adaptive_avg_pool2d(whole.permute(2, 0, 1), features.shape[1]).permute(1, 2, 0)
        return self._mlp("vision.proj_mlp", torch.cat((features[0], pooled), dim=-1).flatten(0, 1))

    # Text.

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        text = self.config["text"]
        width = text["dim"] // (2 * text["n_heads"])
        powers = torch.arange(0, width, 2, dtype=torch.float32) / width
        angles = positions[:, None] / text.get("rope_theta", 10_000.0) ** powers
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        real, imaginary, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
        return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos, rest), dim=-1)

    def _tau(self, block: str, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors [positions, heads] of queries and values."""
        activated = functional.gelu(qkv)
        by_place = torch.sigmoid(self.weights[f"{block}.attn.tau.alpha"] * (positions[:, None] + 1).log()) + 0.5
        of_query, of_value = (
            torch.tanh(functional.linear(activated, self.weights[f"{block}.attn.tau.{name}"])) + by_place
            for name in ("wq", "wv")
        )
        return of_query, of_value

    def _experts(self, block: str, x: Tensor) -> Tensor:
        logits, places = self._linear(f"{block}.mlp.router", x).topk(
            self.config["text"]["moe"]["experts_per_token"]
        )
        shares, result = logits.softmax(-1), torch.zeros_like(x)
        first, second = (self.weights[f"{block}.mlp.{name}.weight"] for name in ("fc1", "fc2"))
        for expert in range(len(first)):
            rows, slots = (places == expert).nonzero(as_tuple=True)
            inner, gate = functional.linear(x[rows], first[expert]).chunk(2, -1)
            out = functional.linear(functional.gelu(inner) * (gate + 1), second[expert])
            result.index_add_(0, rows, out * shares[rows, slots, None])
        return result

    def hidden(self, inputs: Tensor, allowed: Tensor) -> Tensor:
        """Returns the last block's output [positions, dim] under the attention mask `allowed`."""
        text, x = self.config["text"], inputs
        heads, kv_heads = text["n_heads"], text["n_kv_heads"]
        width = text["dim"] // heads
        moe, positions = text.get("moe"), torch.arange(len(inputs), dtype=torch.float32)
        for number in range(text["n_layers"]):
            block = f"text.blocks.{number}"
            normed = self._norm(f"{block}.ln", x)
            qkv = self._linear(f"{block}.attn.qkv", normed)
            sizes = (heads * width, kv_heads * width, kv_heads * width)
            q, k, v = (part.unflatten(-1, (-1, width)) for part in qkv.split(sizes, -1))
            if text.get("tau_attn"):
                of_query, of_value = self._tau(block, qkv, positions)
                q, v = q * of_query[..., None], v * of_value[..., None]
            q, k = self._rotated(q, positions), self._rotated(k, positions)
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
            scores = (q @ k.transpose(-1, -2) / math.sqrt(width)).masked_fill(~allowed, -math.inf)
            attended = self._linear(f"{block}.attn.proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
            is_mixture = moe is not None and number >= moe["start_layer"]
            x = x + attended + (self._experts(block, normed) if is_mixture else self._mlp(f"{block}.mlp", normed))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., vocabulary] of hidden states."""
        return self._linear("text.lm_head", self._norm("text.post_ln", hidden))

    # Coordinates.

    def coordinate(self, hidden: Tensor) -> float:
        """Returns the coordinate that a hidden state [dim] means."""
        if self.config["region"].get("use_ln"):
            hidden = self._norm("region.ln", hidden)
        decoder = "region.coord_decoder"
        bins = (
            self._mlp(decoder, hidden) if f"{decoder}.fc1.weight" in self.weights else self._linear(decoder, hidden)
        )
        return bins.argmax().item() / len(bins)

    def coordinate_embedding(self, value: float) -> Tensor:
        """Returns the embedding [dim] of a coordinate."""
        angles = 2 * math.pi * (torch.tensor([value]) @ self.weights["region.coord_features"])
        return self._linear("region.coord_encoder", torch.cat((angles.cos(), angles.sin())))


# A conversation --------------------------------------------------------------------------------------


def layout(model: Model, messages: Sequence[Mapping[str, Any]], *, reasoning: bool) -> list[int | Picture]:
    """Returns the ids and the pictures of a prompt, in order."""
    ids = model.config["tokenizer"]
    query = ids["templates"]["query"]
    # The training data of Moondream 2 has the suffix twice, the second time replaced where reasoning follows.
    doubled = query["suffix"] if model.is_second else []
    answer_opener, reasoning_opener = [*doubled, *query["suffix"]], [*doubled, ids["thinking_id"]]
    sequence: list[int | Picture] = [ids["bos_id"]]
    instructions: list[str] = []
    for message in messages:
        text = message["text"]
        if message["role"] == "system":
            instructions.append(text)
        elif message["role"] == "user":
            question = "\n\n".join((*instructions, text))
            instructions.clear()
            sequence += [Picture(name) for name in message.get("images", ())]
            sequence += [*query["prefix"], *_encode(model, question.strip())]
        else:
            sequence += [*answer_opener, *_encode(model, text)]
    return [*sequence, *(reasoning_opener if reasoning else answer_opener)]


def _encode(model: Model, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def spans(model: Model, prompt: Sequence[int | Picture]) -> list[tuple[int, int]]:
    """Returns the first position of each picture and the one after its last; BOS belongs to a picture after it."""
    size, place, found = model.config["text"]["prefix_attn"] - 1, 0, []
    for part in prompt:
        if isinstance(part, Picture):
            found.append((0 if place == 1 else place, place + size))
        place += size if isinstance(part, Picture) else 1
    return found


def allowed(length: int, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the attention mask [length, length]: True where a row's position attends to a column's."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for start, end in blocks:
        mask[start:end, start:end] = True
    return mask


class Run:
    """A sequence that grows token by token: `inputs` [positions, dim], of which `blocks` attend to each other."""

    def __init__(self, model: Model, prompt: Sequence[int | Picture]) -> None:
        self._model = model
        self.blocks = spans(model, prompt)
        self.inputs = torch.cat([self._embedding(part) for part in prompt])
        self.sampled: list[Sampled] = []

    def _embedding(self, part: int | Picture) -> Tensor:
        if isinstance(part, Picture):
            return self._model.image_embeddings(part.name)
        return self._model.weights["text.wte"][part][None]

    def append(self, token: Sampled) -> None:
        """Adds a token."""
        if token.value is None:
            row = self._embedding(token.id)
        else:
            row = self._model.coordinate_embedding(token.value)[None]
        self.inputs = torch.cat((self.inputs, row))
        self.sampled.append(token)

    def hidden(self) -> Tensor:
        """Returns the hidden states [positions, dim] of all positions."""
        return self._model.hidden(self.inputs, allowed(len(self.inputs), self.blocks))


@torch.inference_mode()
def answer(model: Model, prompt: Sequence[int | Picture], *, reasoning: bool, max_tokens: int) -> Answer:
    """Returns the greedy answer; reasoning and the answer have at most `max_tokens` tokens each."""
    ids, run, margins = model.config["tokenizer"], Run(model, prompt), []
    first_hidden = first_logits = None

    def next_token(suppressed: Sequence[int]) -> tuple[int, Tensor]:
        nonlocal first_hidden, first_logits
        hidden = run.hidden()[-1]
        logits = model.logits(hidden)
        if first_hidden is None:
            first_hidden, first_logits = hidden, logits
        logits = logits.clone()
        logits[list(suppressed)] = -math.inf
        best = logits.topk(2)
        margins.append((best.values[0] - best.values[1]).item())
        return int(best.indices[0]), hidden

    expect: dict[str, Any] = {}
    if reasoning:
        passages: list[tuple[str, list[float]]] = []
        words: list[int] = []
        places: list[float] = []

        def end_passage() -> None:
            passages.append((model.tokenizer.decode(words), list(places)))
            words.clear()
            places.clear()

        for number in range(max_tokens):
            token, hidden = next_token((ids["eos_id"], ids["size_id"]) if number and model.is_second else ())
            if token == ids["answer_id"]:
                break
            value = model.coordinate(hidden) if token == ids["coord_id"] else None
            run.append(Sampled(token, value))
            if token in (ids["start_ground_points_id"], ids["end_ground_id"]):
                end_passage()
            elif value is not None:
                places.append(value)
            else:
                words.append(token)
        end_passage()
        run.append(Sampled(ids["answer_id"]))
        expect["reasoning"] = _reasoning(passages)
    text: list[int] = []
    for number in range(max_tokens):
        token, _ = next_token((ids["answer_id"],) if number and model.is_second else ())
        run.append(Sampled(token))
        if token == ids["eos_id"]:
            break
        text.append(token)
    expect["answer"] = model.tokenizer.decode(text)
    assert first_hidden is not None
    assert first_logits is not None
    return Answer(run.sampled, expect, first_hidden, first_logits, min(margins))


def _reasoning(passages: Sequence[tuple[str, list[float]]]) -> dict[str, Any]:
    text, grounding = "", []
    for words, places in passages:
        start, text = len(text), text + words
        points = [list(pair) for pair in zip(places[::2], places[1::2], strict=False)]
        if points:
            grounding.append({"start_idx": start, "end_idx": len(text), "points": points})
    return {"text": text, "grounding": grounding}


# Files -----------------------------------------------------------------------------------------------


def check(folder: Path) -> list[str]:
    """Compares the definition with the reference's answers to single questions; returns the differences."""
    model = Model(folder)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    tensors, differences = load_file(folder / "expected.safetensors"), []
    num_compared = 0

    def compare(name: str, actual: Tensor, tolerance: float) -> None:
        nonlocal num_compared
        num_compared += 1
        error = (actual - tensors[name]).abs().max().item()
        if not error <= tolerance:
            differences.append(f"{name}: off by {error}, allowed {tolerance}")

    cases = [(image["image"], image["calls"]) for image in expected["images"]]
    cases.append((None, expected.get("text_only", [])))
    for number, (image, calls) in enumerate(cases):
        with torch.inference_mode():
            rows = None if image is None else model.image_embeddings(image)[::EVERY]
        if rows is not None:
            name = f"{number}.image_embeddings_every_9th"
            compare(name, rows, _HIDDEN_TOLERANCE * tensors[name].abs().max().item())
        is_first = image is not None
        for call in calls:
            if call["skill"] != "query" or "spatial_refs" in call["args"]:
                continue
            message = {"role": "user", "text": call["args"]["question"], "images": [] if image is None else [image]}
            reasoning = call["args"]["reasoning"]
            prompt = layout(model, [message], reasoning=reasoning)
            found = answer(model, prompt, reasoning=reasoning, max_tokens=expected["max_tokens"])
            if found.expect != call["expect"]:
                differences.append(f"{image} {call['args']}: {found.expect}, expected {call['expect']}")
            num_compared += 1
            if is_first:
                is_first = False
                compare(f"{number}.query_prompt_logits", found.logits, _LOGIT_TOLERANCE)
                hidden = f"{number}.query_prompt_last_hidden"
                compare(hidden, found.hidden, _HIDDEN_TOLERANCE * tensors[hidden].abs().max().item())
    print(f"{folder}: {num_compared} values compared, {len(differences)} differ")
    return differences


def prompt_of(model: Model, conversation: Mapping[str, Any]) -> list[int | Picture]:
    """Returns the prompt of a conversation of `conversations.json`."""
    return layout(model, conversation["messages"], reasoning=conversation["reasoning"])


def write(folder: Path) -> None:
    """Computes the answers of a folder to its conversations that have none, and writes them."""
    path, tensor_path = folder / CONVERSATIONS, folder / TENSORS
    fixture, model = json.loads(path.read_text(encoding="utf-8")), Model(folder)
    tensors = load_file(tensor_path) if tensor_path.exists() else {}
    for number, conversation in enumerate(fixture["conversations"]):
        if "expect" in conversation:
            continue
        prompt = prompt_of(model, conversation)
        reasoning = conversation["reasoning"]
        found = answer(model, prompt, reasoning=reasoning, max_tokens=fixture["max_tokens"])
        conversation["prompt"] = [part.name if isinstance(part, Picture) else part for part in prompt]
        conversation["blocks"] = spans(model, prompt)
        conversation["tokens"] = [
            token.id if token.value is None else [token.id, token.value] for token in found.tokens
        ]
        conversation["margin"] = round(found.margin, 4)
        conversation["expect"] = found.expect
        tensors[f"{number}.last_hidden"] = found.hidden
        tensors[f"{number}.logits_every_9th"] = found.logits[::EVERY].clone()
        print(f"{folder.name} {conversation['name']}: margin {found.margin:.4f}, {found.expect}")
    compact = json.JSONEncoder(separators=(",", ":")).encode
    lines = ",\n".join(map(compact, fixture["conversations"]))
    head = compact({key: value for key, value in fixture.items() if key != "conversations"})
    path.write_text(f'{head[:-1]},"conversations":[\n{lines}\n]}}\n', encoding="utf-8")
    save_file(tensors, tensor_path)


def main(words: Sequence[str]) -> int:
    """Runs a command; returns 1 if something differs."""
    command, *folders = words
    torch.set_num_threads(1)  # the products are small
    differences: list[str] = []
    for folder in map(Path, folders):
        if command == "write":
            write(folder)
        else:
            differences += check(folder)
    print(*differences, sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
