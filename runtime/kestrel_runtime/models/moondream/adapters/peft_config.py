"""Reads PEFT's `adapter_config.json`. Refuses all settings that this engine does not apply."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_NAME = re.compile(r"[\w.]+", re.ASCII)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\..*", re.ASCII)
_MAX_ECHO_CHARS = 64
# Fields that say how an adapter was made, or that the shapes of its tensors tell.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode"),
        *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
        *("qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules"),
        *("target_parameters", "task_type"),
    }
)
_UNDERSTOOD = frozenset({"alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "use_rslora"})
# Ways to begin that leave the weights of the model as they are.
_BEGINNINGS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that matter."""

    alpha: float
    alpha_by_suffix: Mapping[str, float]
    """By the end of a module's name."""
    takes_root: bool
    """Whether the scale is alpha / sqrt(rank) and not alpha / rank."""
    version: tuple[int, int] | None
    """Of PEFT; None where it is not told."""

    @classmethod
    def read(cls, data: Mapping[str, Any], problems: list[str]) -> PeftConfig:
        """Adds what cannot be applied to `problems`, each with the name of its field."""
        if data.get("peft_type", "LORA") != "LORA":
            problems.append(f"peft_type: must be LORA, not {_shown(data['peft_type'])}")
        begins = data.get("init_lora_weights", True)
        if not isinstance(begins, bool) and begins is not None and begins not in _BEGINNINGS:
            problems.append(f"init_lora_weights: {_shown(begins)} changes the weights of the model")
        for name, value in data.items():
            is_neutral = value in (None, False, "none", "") or (isinstance(value, (list, dict)) and not value)
            if name not in _WITHOUT_EFFECT | _UNDERSTOOD and not is_neutral:
                problems.append(f"{name[:_MAX_ECHO_CHARS]}: {_shown(value)} is not supported")
        by_suffix = data.get("alpha_pattern") or {}
        if not isinstance(by_suffix, Mapping) or not all(_NAME.fullmatch(key) for key in by_suffix):
            problems.append("alpha_pattern: must have names of modules, without patterns")
            by_suffix = {}
        alphas = {"lora_alpha": data.get("lora_alpha"), **by_suffix}
        bad = [name for name, value in alphas.items() if not _is_number(value)]
        problems += [f"{name[:_MAX_ECHO_CHARS]}: must be a number" for name in bad]
        if bad:
            alphas = {"lora_alpha": 0.0}
        alpha = float(alphas.pop("lora_alpha") or 0.0)
        version = _VERSION.fullmatch(str(data.get("peft_version", ""))[:_MAX_ECHO_CHARS])
        return cls(
            alpha,
            MappingProxyType({name: float(value or 0.0) for name, value in alphas.items()}),
            data.get("use_rslora") is True,
            None if version is None else (int(version[1]), int(version[2])),
        )

    def scale_of(self, target: str, rank: int) -> float:
        """The factor of an adapter of a rank, for a target such as "blocks.3.attn.qkv"."""
        module = f"text.{target}"
        found = (alpha for suffix, alpha in self.alpha_by_suffix.items() if f".{module}".endswith(f".{suffix}"))
        alpha = next(found, self.alpha)
        return alpha / (math.sqrt(rank) if self.takes_root else rank)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and abs(value) < 1e9


def _shown(value: object) -> str:
    return repr(value)[:_MAX_ECHO_CHARS]
