"""The number formats that `--precision` selects: of the weights, of both paths and of the key-value cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kestrel_runtime.api.config import EngineConfig

PRECISIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "auto": {},
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "float8": {"text_path": "fused-float8", "vision_path": "calibrated-float8", "kv_dtype": "float8"},
    }
)
"""By name: fields of `EngineConfig`, each for where that field is auto."""

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "bfloat16 on a GPU, else float32; float8 has to be asked for, since all of it together costs more"
        " than half a point of accuracy in bench/results and was measured on the built-in model alone",
        "float32": "float32, as asked for",
        "bfloat16": "bfloat16, as asked for",
        "float8": "float8 for the decoder, the image encoder and the key-value cache, as asked for",
    }
)


def with_precision(config: EngineConfig, precision: str) -> EngineConfig:
    """The configuration with the formats of this precision. A format that is set by its own option stays."""
    formats = PRECISIONS[precision]
    return replace(config, **{name: value for name, value in formats.items() if getattr(config, name) == "auto"})


def precision_line(config: EngineConfig, precision: str) -> str:
    """For the log: what was chosen and why. `config` is the one without the precision."""
    given = [f"--{name.replace('_', '-')} {value}" for name, value in _formats_of(config) if value != "auto"]
    line = f"precision {precision}: {_REASONS[precision]}"
    return f"{line}; except {', '.join(given)}" if given else line


def _formats_of(config: EngineConfig) -> list[tuple[str, str]]:
    return [(name, getattr(config, name)) for name in ("dtype", "text_path", "vision_path", "kv_dtype")]
