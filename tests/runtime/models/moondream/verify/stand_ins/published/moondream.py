"""The inner model: methods as the public reference has them, which return what is recorded beside this file.

Like the reference it crops images itself and rounds pixels to bfloat16.
"""

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping


class EncodedImage(NamedTuple):
    """Which of the recorded images it is, and keys and values by layer."""

    place: int
    caches: list[tuple[Tensor, Tensor]]


def prepare_crops(image: Image.Image, config: MoondreamConfig) -> tuple[Tensor, tuple[int, int]]:
    """The crops [crops, 3, side, side] in bfloat16, and their rows and columns."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    crops = MoondreamCropping(config.vision).make_crops(decode_image(buffer.getvalue(), max_image_pixels=10**7))
    pixels = torch.from_numpy(crops.pixels).permute(0, 3, 1, 2)
    return pixels.to(torch.bfloat16).div_(255.0).sub_(0.5).div_(0.5), (crops.rows, crops.columns)


class MoondreamModel(nn.Module):
    """Answers only what is recorded."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.config = MoondreamConfig.from_dict(json.loads((folder / "config.json").read_text()))
        self._recorded = json.loads((folder / "recorded.json").read_text())
        self._tensors = load_file(folder / "recorded.safetensors")
        self._images = [Image.open(folder / entry["image"]).convert("RGB") for entry in self._recorded["images"]]

    def _vis_enc(self, crops: Tensor) -> Tensor:
        assert crops.dtype == torch.float32, "pixels come in full precision"
        return crops

    def _run_vision_encoder(self, image: Image.Image) -> Tensor:
        crops, _ = prepare_crops(image, self.config)
        self._vis_enc(crops)
        every_9th = self._tensors[f"{self._images.index(image)}.image_embeddings_every_9th"]
        embeddings = torch.zeros(self.config.positions_per_image, every_9th.shape[1])
        embeddings[::9] = every_9th
        return embeddings

    def encode_image(self, image: Image.Image) -> EncodedImage:
        """Embeddings, and what they become in the cache."""
        self._run_vision_encoder(image)
        index = self._images.index(image)
        caches: list[tuple[Tensor, Tensor]] = []
        if f"{index}.last_layer_k_first8" in self._tensors:
            first_keys = self._tensors[f"{index}.last_layer_k_first8"]
            last_values = self._tensors[f"{index}.last_layer_v_last8"]
            unknown = torch.full(
                (len(first_keys), self.config.positions_per_image - 7, first_keys.shape[-1]), torch.nan
            )
            caches.append((torch.cat((first_keys, unknown), 1)[None], torch.cat((unknown, last_values), 1)[None]))
        return EncodedImage(index, caches)

    def _prefill_prompt(
        self, prompt_tokens: Tensor, pos: int, temperature: float, top_p: float
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        logits = self._tensors[f"{pos}.query_prompt_logits"]
        hidden = self._tensors[f"{pos}.query_prompt_last_hidden"]
        return logits[None], hidden[None, None], logits.argmax()[None], pos

    def query(
        self,
        image: EncodedImage | None = None,
        question: str | None = None,
        reasoning: bool = False,
        spatial_refs: Any = None,
        stream: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The recorded answer to a question."""
        if image is not None:
            tokens = self._recorded["images"][image.place]["query_prompt_tokens"]
            self._prefill_prompt(torch.tensor([tokens]), image.place, 0, 0)
        refs = {"spatial_refs": spatial_refs} if spatial_refs else {}
        return self._find("query", image, settings, question=question, reasoning=reasoning, **refs)

    def caption(
        self, image: EncodedImage, length: str = "normal", settings: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The recorded caption."""
        return self._find("caption", image, settings, length=length)

    def point(self, image: EncodedImage, object: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """The recorded points."""
        return self._find("point", image, settings, object=object)

    def detect(self, image: EncodedImage, object: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """The recorded boxes."""
        return self._find("detect", image, settings, object=object)

    def _find(
        self, skill: str, image: EncodedImage | None, settings: dict[str, Any] | None, **args: Any
    ) -> dict[str, Any]:
        assert settings is not None
        assert settings["temperature"] == 0
        if "max_objects" in settings:
            args["max_objects"] = settings["max_objects"]
        calls = self._recorded["text_only"] if image is None else self._recorded["images"][image.place]["calls"]
        return next(call["expect"] for call in calls if (call["skill"], call["args"]) == (skill, args))
