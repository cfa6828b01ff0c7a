"""Which implementation serves each operation of the fast path: chosen once, at start.

An implementation is a module `kestrel_ops.<implementation>.<operation>` with a function of the operation's name.
`reference` has every one; the others have those that pay on a CUDA device. Knows no tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

_FASTEST_FIRST = ("cuda", "triton", "library")
_REFERENCE = "reference"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """One function for each operation; what they do stands with their definitions under `reference/`."""

    resample: Callable[..., Any]
    add_layer_norm: Callable[..., Any]
    concat_gelu: Callable[..., Any]
    scaled_linear: Callable[..., Any]
    scaled_linear_gelu: Callable[..., Any]
    scaled_linear_add: Callable[..., Any]
    crop_attention: Callable[..., Any]
    rotary_write_kv: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    decode_expand: Callable[..., Any]
    decode_contract: Callable[..., Any]
    rotary_decode_attention: Callable[..., Any]
    mixture_of_experts: Callable[..., Any]

    @classmethod
    def select(cls, device_type: str, choices: Mapping[str, str]) -> Kernels:
        """The fastest of each on a CUDA device, the definitions elsewhere; `choices` (operation → implementation)
        goes first.

        Raises ValueError naming every operation or implementation of `choices` that there is not.
        """
        operations = [field.name for field in fields(cls)]
        unknown = [
            f"{operation}={implementation}"
            for operation, implementation in choices.items()
            if operation not in operations or not _exists(implementation, operation)
        ]
        if unknown:
            raise ValueError(f"no such kernels: {', '.join(unknown)}")
        chosen = {operation: choices.get(operation) or _default(device_type, operation) for operation in operations}
        _log.info("kernels: %s", ", ".join(f"{operation}={name}" for operation, name in chosen.items()))
        return cls(**{operation: _load(name, operation) for operation, name in chosen.items()})


def _default(device_type: str, operation: str) -> str:
    if device_type != "cuda":
        return _REFERENCE
    return next((name for name in _FASTEST_FIRST if _exists(name, operation)), _REFERENCE)


def _exists(implementation: str, operation: str) -> bool:
    if implementation not in (_REFERENCE, *_FASTEST_FIRST):
        return False
    return importlib.util.find_spec(f"kestrel_ops.{implementation}.{operation}") is not None


def _load(implementation: str, operation: str) -> Callable[..., Any]:
    module = importlib.import_module(f"kestrel_ops.{implementation}.{operation}")
    function: Callable[..., Any] = getattr(module, operation)
    return function
