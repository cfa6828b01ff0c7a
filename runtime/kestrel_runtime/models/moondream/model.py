"""The whole model: text, vision and region parts, and tokens with values."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kestrel_runtime.execution.transfer import to_device, uploaded
from kestrel_runtime.loading.progress import told
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.fused.weights import float8_rows
from kestrel_runtime.models.moondream.region import RegionModel
from kestrel_runtime.models.moondream.text.decoder import TextModel
from kestrel_runtime.models.moondream.vision.encoder import VisionModel
from kestrel_runtime.scheduling.output_parser import Token

_EXPERT_WEIGHTS = re.compile(r"text\.blocks\.(\d+)\.mlp\.fc[12]\.weight")
_EXPERT_AXES = 3  # a layer without experts has matrices of this name


class Moondream(nn.Module):
    """The whole model. Build it on the meta device and assign a checkpoint's tensors with `from_state`."""

    def __init__(self, config: MoondreamConfig, *, fp8_experts: bool = False) -> None:
        super().__init__()
        self.config = config
        self.text = TextModel(config.text, fp8_experts=fp8_experts)
        self.vision = VisionModel(config.vision)
        self.region = RegionModel(config.region)
        self.expert_errors: dict[int, list[float]] = {}
        """By layer: the relative errors of both weights of its experts, where loading has rounded them."""

    @classmethod
    def from_state(
        cls,
        config: MoondreamConfig,
        state: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        rounds_experts: bool = False,
    ) -> Moondream:
        """Load a checked state. Float8 experts and their scales keep their types, all other weights become `dtype`.

        With `rounds_experts` the weights of experts become float8, too. Entries of `state` are removed one by one,
        so that source and copy are never in memory completely.
        """
        has_float8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in state.values())
        rounds_experts = rounds_experts and config.text.moe is not None and not has_float8
        with torch.device("meta"):
            model = cls(config, fp8_experts=has_float8 or rounds_experts)
        placed: dict[str, Tensor] = {}

        def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
            keeps_type = tensor.dtype == torch.float8_e4m3fn or name.endswith(".scale")
            return tensor.dtype if keeps_type else dtype

        num_bytes = sum(tensor.nbytes for tensor in state.values())
        if device.type == "cuda" and not rounds_experts:
            tensors = uploaded(state, device, dtype_of)
            num_bytes = sum(tensor.numel() * dtype_of(name, tensor).itemsize for name, tensor in state.items())
        else:
            tensors = ((name, state.pop(name)) for name in list(state))
        for name, tensor in told(tensors, num_bytes):
            if rounds_experts and (found := _EXPERT_WEIGHTS.fullmatch(name)) and tensor.ndim == _EXPERT_AXES:
                scales = name.removesuffix("weight") + "scale"
                placed[name], placed[scales], error = float8_experts(tensor.to(device))
                model.expert_errors.setdefault(int(found[1]), []).append(error)
                continue
            placed[name] = tensor.to(device=device, dtype=dtype_of(name, tensor))
        model.load_state_dict(placed, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.text.wte.dtype

    @property
    def has_float8_experts(self) -> bool:
        """Whether experts are stored in float8."""
        return any(tensor.dtype == torch.float8_e4m3fn for tensor in self.parameters())

    @property
    def device(self) -> torch.device:
        return self.text.wte.device

    def embed(self, tokens: Sequence[Token]) -> Tensor:
        """Tokens → embeddings [tokens, dim]. A token with a value is embedded by its value."""
        counts = [len(token.value) for token in tokens]
        device = self.device
        return self.embed_sampled(
            to_device([token.id for token in tokens], torch.int64, device),
            to_device(counts, torch.int64, device),
            to_device([(*token.value, 0.0, 0.0)[:2] for token in tokens], torch.float32, device),
            value_kinds=sum(1 << (count - 1) for count in set(counts) - {0}),
        )

    def embed_sampled(self, ids: Tensor, num_values: Tensor, values: Tensor, value_kinds: int) -> Tensor:
        """Embeddings [B, dim] of tokens on the device: ids and num_values int64 [B], values float32 [B, 2].

        Tokens with n values are supported if bit n - 1 of `value_kinds` is set.
        """
        embeddings = self.text.wte[ids]
        if value_kinds & 1:
            found = self.region.encode_coordinates(values[:, 0])
            embeddings = torch.where((num_values == 1)[:, None], found, embeddings)
        if value_kinds & 2:
            embeddings = torch.where((num_values == 2)[:, None], self.region.encode_sizes(values), embeddings)
        return embeddings


@torch.no_grad()
def float8_experts(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Weights [experts, out, in] as float8_e4m3fn, the scale of each row, float32 [experts, out], and the error.

    The error is the root of the mean square of what rounding changes, divided by that of the weights: about 0.026
    for normally distributed weights. One expert at a time, so that little is in float32.
    """
    rounded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    changed = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for number, expert in enumerate(weight):
        wide = expert.float()
        rounded[number], scales[number] = short, scale = float8_rows(wide)
        changed = changed + (short.float() * scale[:, None] - wide).double().square().sum()
        total = total + wide.double().square().sum()
    return rounded, scales, (changed / total).sqrt().item() if total else 0.0
