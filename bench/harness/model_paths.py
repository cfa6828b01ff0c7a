"""The ways through a model that correctness is checked on, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kestrel_runtime.api.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ModelPath:
    """Settings of an engine that say how it computes."""

    dtype: str
    text: str = "fused"
    vision: str = "fused"
    kv_dtype: str = "auto"
    cuda_graphs: bool | None = None
    """None: as the engine decides."""

    @property
    def needs_cuda(self) -> bool:
        """Whether it only exists on a GPU."""
        return bool(self.cuda_graphs)


PATHS: Mapping[str, ModelPath] = MappingProxyType(
    {
        "plain": ModelPath("float32", "plain", "plain"),
        "fused": ModelPath("float32", cuda_graphs=False),
        "fused-graphs": ModelPath("float32", cuda_graphs=True),
        "bfloat16-plain": ModelPath("bfloat16", "plain", "plain"),
        "bfloat16": ModelPath("bfloat16"),
        "float16": ModelPath("float16"),
        "text-float8": ModelPath("bfloat16", text="fused-float8"),
        "vision-float8": ModelPath("bfloat16", vision="fused-float8"),
        "vision-calibrated": ModelPath("bfloat16", vision="calibrated-float8"),
        "cache-float8": ModelPath("bfloat16", kv_dtype="float8"),
        "all-float8": ModelPath("bfloat16", "fused-float8", "calibrated-float8", "float8"),
    }
)
FLOAT32_PATHS = tuple(name for name, path in PATHS.items() if path.dtype == "float32")
REDUCED_PATHS = tuple(name for name in PATHS if name not in FLOAT32_PATHS)


def path_config(name: str, device: str) -> EngineConfig:
    """The engine's configuration for a path on "cpu" or "cuda"."""
    path = PATHS[name]
    return EngineConfig(
        device=device,
        dtype=path.dtype,
        text_path=path.text,
        vision_path=path.vision,
        kv_dtype=path.kv_dtype,
        cuda_graphs=path.cuda_graphs,
    )
