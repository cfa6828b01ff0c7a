"""Defines the whole model: text, vision and region parts, and tokens with values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kestrel_runtime.execution.transfer import to_device, uploaded
from kestrel_runtime.loading.progress import with_progress
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.early_kernels import EarlyKernels
from kestrel_runtime.models.moondream.quantisation import QuantisedFormat, quantised_stack
from kestrel_runtime.models.moondream.region import RegionModel
from kestrel_runtime.models.moondream.text.decoder import ExpertFormat, TextModel
from kestrel_runtime.models.moondream.vision.encoder import VisionModel
from kestrel_runtime.output.output_parser import Token

_EXPERT_WEIGHTS = re.compile(r"text\.blocks\.(\d+)\.mlp\.fc[12]\.weight")
_EXPERT_AXES = 3  # a layer without experts has matrices of this name


class Moondream(nn.Module):
    """The whole model. Build it on the meta device and assign a checkpoint's tensors with `from_state`."""

    def __init__(self, config: MoondreamConfig, *, expert_format: ExpertFormat = "model") -> None:
        super().__init__()
        self.config = config
        self.text = TextModel(config.text, expert_format=expert_format)
        self.vision = VisionModel(config.vision)
        self.region = RegionModel(config.region)
        self.expert_errors: dict[int, list[float]] = {}
        """The relative errors of both weights of the experts by layer, where loading has quantised them."""
        self.early_kernels: EarlyKernels | None = None
        """The kernels that were loaded while the weights were copied."""

    @classmethod
    def from_state(
        cls,
        config: MoondreamConfig,
        state: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        experts: QuantisedFormat | None = None,
    ) -> Moondream:
        """Loads a checked state. Float8 experts and their scales keep their types, all other weights become
        `dtype`.

        With `experts` the weights of experts are quantised to that format; float8 weights are not quantised to
        float8 again. Entries of `state` are removed one by one, so that source and copy are never both complete.
        """
        target_format = quantised_to(config, state, experts)

        def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
            keeps_type = tensor.dtype == torch.float8_e4m3fn or name.endswith(".scale")
            return tensor.dtype if keeps_type else dtype

        num_bytes = sum(tensor.nbytes for tensor in state.values())
        if device.type == "cuda" and target_format is None:
            tensors = uploaded(state, device, dtype_of)
            num_bytes = sum(tensor.numel() * dtype_of(name, tensor).itemsize for name, tensor in state.items())
        else:
            # Experts that are quantised take their scales with them.
            names = sorted(state, key=lambda name: name.endswith(".scale"))
            tensors = ((name, state.pop(name)) for name in names if name in state)
        with torch.device("meta"):
            model = cls(config, expert_format=target_format or stored_format(state))
        placed: dict[str, Tensor] = {}
        for name, tensor in with_progress(tensors, num_bytes):
            found = _EXPERT_WEIGHTS.fullmatch(name) if tensor.ndim == _EXPERT_AXES else None
            if target_format is not None and found is not None:
                scale_name = name.removesuffix("weight") + "scale"
                quantised = quantised_stack(tensor, state.pop(scale_name, None), target_format, device)
                placed[name], placed[scale_name] = quantised.weight, quantised.scale
                model.expert_errors.setdefault(int(found[1]), []).append(quantised.error)
                continue
            placed[name] = tensor.to(device=device, dtype=dtype_of(name, tensor))
        model.load_state_dict(placed, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.text.wte.dtype

    @property
    def expert_format(self) -> ExpertFormat:
        """Returns how the experts are stored; "model" if there are none."""
        types = {tensor.dtype for tensor in self.text.parameters()}
        return "int4" if torch.uint8 in types else "float8" if torch.float8_e4m3fn in types else "model"

    @property
    def device(self) -> torch.device:
        return self.text.wte.device

    def embed(self, tokens: Sequence[Token]) -> Tensor:
        """Computes tokens → embeddings [tokens, dim]. A token with a value is embedded by its value."""
        counts = [len(token.value) for token in tokens]
        device = self.device
        return self.embed_sampled(
            to_device([token.id for token in tokens], torch.int64, device),
            to_device(counts, torch.int64, device),
            to_device([(*token.value, 0.0, 0.0)[:2] for token in tokens], torch.float32, device),
            value_kinds=sum(1 << (count - 1) for count in set(counts) - {0}),
        )

    def embed_sampled(self, ids: Tensor, num_values: Tensor, values: Tensor | None, value_kinds: int) -> Tensor:
        """Returns embeddings [B, dim] of tokens on the device: ids and num_values int64 [B], values float32 [B, 2].

        Tokens with n values are supported if bit n - 1 of `value_kinds` is set; without any bit `values` may be
        None.
        """
        embeddings = self.text.wte[ids]
        if values is None:
            return embeddings
        if value_kinds & 1:
            found = self.region.encode_coordinates(values[:, 0])
            embeddings = torch.where((num_values == 1)[:, None], found, embeddings)
        if value_kinds & 2:
            embeddings = torch.where((num_values == 2)[:, None], self.region.encode_sizes(values), embeddings)
        return embeddings


def stored_format(state: Mapping[str, Tensor]) -> ExpertFormat:
    """Returns the format of experts in a checked state; "model" if there are none."""
    return "float8" if any(tensor.dtype == torch.float8_e4m3fn for tensor in state.values()) else "model"


def quantised_to(
    config: MoondreamConfig, state: Mapping[str, Tensor], experts: QuantisedFormat | None
) -> QuantisedFormat | None:
    """Returns the format that loading quantises experts to; None if it leaves them as they are."""
    return None if config.text.moe is None or experts == stored_format(state) else experts
