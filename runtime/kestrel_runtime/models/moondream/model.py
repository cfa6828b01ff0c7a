"""One Moondream: text, vision and region parts, and the tokens that carry values. No pages, no batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.interfaces.tokens import Token
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.region import RegionModel
from kestrel_runtime.models.moondream.text import TextModel
from kestrel_runtime.models.moondream.vision import VisionModel


class Moondream(nn.Module):
    """The whole model. Build it on the meta device and assign a checkpoint's tensors with `from_state`."""

    def __init__(self, config: MoondreamConfig, *, fp8_experts: bool = False) -> None:
        super().__init__()
        self.config = config
        self.text = TextModel(config.text, fp8_experts=fp8_experts)
        self.vision = VisionModel(config.vision)
        self.region = RegionModel(config.region)

    @classmethod
    def from_state(
        cls, config: MoondreamConfig, state: dict[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> Moondream:
        """Take a checked state; float8 experts and their scales keep their types, all else becomes `dtype`.

        `state` is emptied on the way, so that source and copy never stand in memory whole together.
        """
        fp8_experts = any(tensor.dtype == torch.float8_e4m3fn for tensor in state.values())
        with torch.device("meta"):
            model = cls(config, fp8_experts=fp8_experts)
        placed: dict[str, Tensor] = {}
        for name in list(state):
            tensor = state.pop(name)
            keeps_type = tensor.dtype == torch.float8_e4m3fn or name.endswith(".scale")
            placed[name] = tensor.to(device=device, dtype=tensor.dtype if keeps_type else dtype)
        model.load_state_dict(placed, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.text.wte.dtype

    @property
    def device(self) -> torch.device:
        return self.text.wte.device

    def embed(self, tokens: Sequence[Token]) -> Tensor:
        """Tokens → embeddings [tokens, dim]; one that carries a value is embedded by that value."""
        kinds = [len(token.value) for token in tokens]
        device = self.device
        return self.embed_drawn(
            to_device([token.id for token in tokens], torch.int64, device),
            to_device(kinds, torch.int64, device),
            to_device([(*token.value, 0.0, 0.0)[:2] for token in tokens], torch.float32, device),
            with_coordinates=1 in kinds,
            with_sizes=2 in kinds,
        )

    def embed_drawn(
        self, ids: Tensor, kinds: Tensor, values: Tensor, *, with_coordinates: bool, with_sizes: bool
    ) -> Tensor:
        """Embeddings [B, dim] of tokens that stand on the device: ids and kinds int64 [B], values float32 [B, 2].

        A token's kind is the number of its values. Without `with_coordinates` or `with_sizes` none of that kind
        may be there.
        """
        embeddings = self.text.wte[ids]
        if with_coordinates:
            found = self.region.encode_coordinates(values[:, 0])
            embeddings = torch.where((kinds == 1)[:, None], found, embeddings)
        if with_sizes:
            embeddings = torch.where((kinds == 2)[:, None], self.region.encode_sizes(values), embeddings)
        return embeddings
