"""Reads PEFT's `adapter_config.json`. Refuses all settings that this engine does not apply."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from kestrel_runtime.models.moondream.adapters.name_patterns import NamePatterns

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\..*", re.ASCII)
_MAX_ECHO_CHARS = 64
_MAX_ALPHA, _MAX_RANK = 1e9, 2**20
# Fields that say how an adapter was made, or that follow from the shapes of its tensors.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode"),
        *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    }
)
_UNDERSTOOD = frozenset(
    {
        *("alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern"),
        *("target_parameters", "use_rslora"),
    }
)
# Ways to begin that leave the weights of the model as they are.
_BEGINNINGS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that matter."""

    alpha: float
    alphas: NamePatterns[float]
    """Values of alpha by the names of modules."""
    rank: int | None
    """None where the file does not say it."""
    ranks: NamePatterns[int]
    takes_root: bool
    """True if the scale is alpha / sqrt(rank) and not alpha / rank."""
    parameters: tuple[str, ...]
    """The names of parameters, or their ends, that PEFT changed as parameters and not as modules."""
    version: tuple[int, int] | None
    """The version of PEFT; None if the file does not say it."""

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
        takes_root = data.get("use_rslora")
        if takes_root is not None and not isinstance(takes_root, bool):
            problems.append(f"use_rslora: must be true or false, not {_shown(takes_root)}")
        alpha, rank = data.get("lora_alpha"), data.get("r")
        if not _is_alpha(alpha):
            problems.append(f"lora_alpha: must be {_AN_ALPHA}, not {_shown(alpha)}")
        if rank is not None and not _is_rank(rank):
            problems.append(f"r: must be {_A_RANK}, not {_shown(rank)}")
        parameters = data.get("target_parameters") or ()
        if not isinstance(parameters, (list, tuple)) or not all(isinstance(name, str) for name in parameters):
            problems.append("target_parameters: must be a list of names")
            parameters = ()
        version = _VERSION.fullmatch(str(data.get("peft_version", ""))[:_MAX_ECHO_CHARS])
        alphas, ranks = _alphas(data.get("alpha_pattern"), problems), _ranks(data.get("rank_pattern"), problems)
        return cls(
            alpha if _is_alpha(alpha) else 0.0,
            NamePatterns(alphas, problems, "alpha_pattern"),
            rank if _is_rank(rank) else None,
            NamePatterns(ranks, problems, "rank_pattern"),
            takes_root is True,
            tuple(parameters),
            None if version is None else (int(version[1]), int(version[2])),
        )

    def scale_of(self, module: str, rank: int) -> float:
        """Returns the factor of a pair of this rank.

        `module` is its name in the file, without `base_model.model.`.
        """
        alpha = self.alphas.first(self._name_of(module))
        return (self.alpha if alpha is None else alpha) / (math.sqrt(rank) if self.takes_root else rank)

    def rank_of(self, module: str, *, is_stack: bool) -> int | None:
        """Returns the rank that the file says for a module, or for each expert of a stack of them; None if it says
        none.

        `r` means an expert's rank only where `target_parameters` names the stack.
        """
        name = self._name_of(module)
        rank = self.ranks.first(name)
        return self.rank if rank is None and not (is_stack and name == module) else rank

    def check_patterns(self, modules: Iterable[str], problems: list[str]) -> None:
        """Adds to `problems` which keys of the patterns match none of the modules."""
        names = [self._name_of(module) for module in modules]
        self.alphas.check_use(names, problems)
        self.ranks.check_use(names, problems)

    def _name_of(self, module: str) -> str:
        """Returns the name that PEFT compares with patterns: for `target_parameters`, the parameter's."""
        parameter = f"{module}.weight"
        is_parameter = any(parameter == name or parameter.endswith(f".{name}") for name in self.parameters)
        return parameter if is_parameter else module


_AN_ALPHA = f"a finite number of at most {_MAX_ALPHA:.0e}"
_A_RANK = f"an integer from 1 to {_MAX_RANK}"


def _alphas(value: object, problems: list[str]) -> Mapping[str, float]:
    given = _pattern("alpha_pattern", value, problems)
    wrong = {key: alpha for key, alpha in given.items() if not _is_alpha(alpha)}
    problems += [
        f"alpha_pattern: {_shown(key)} must have {_AN_ALPHA}, not {_shown(alpha)}" for key, alpha in wrong.items()
    ]
    return {key: float(alpha) for key, alpha in given.items() if key not in wrong}


def _ranks(value: object, problems: list[str]) -> Mapping[str, int]:
    given = _pattern("rank_pattern", value, problems)
    wrong = {key: rank for key, rank in given.items() if not _is_rank(rank)}
    problems += [
        f"rank_pattern: {_shown(key)} must have {_A_RANK}, not {_shown(rank)}" for key, rank in wrong.items()
    ]
    return {key: rank for key, rank in given.items() if key not in wrong}


def _pattern(field: str, value: object, problems: list[str]) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        problems.append(f"{field}: must be an object with names of modules, not {_shown(value)}")
    return value if isinstance(value, Mapping) else {}


def _is_alpha(value: object) -> TypeGuard[float]:
    # The comparison is exact for integers beyond the range of floats, and false for NaN.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_ALPHA


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_RANK


def _shown(value: object) -> str:
    # It cuts long and deep values before they become text.
    return reprlib.repr(value)[:_MAX_ECHO_CHARS]
