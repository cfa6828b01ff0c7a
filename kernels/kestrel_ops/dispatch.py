"""Selects an implementation of each fused operation, once, at the start.

`reference` defines all operations, for any model. Implementations that are faster on a CUDA device stand next to an
operation's definition: the module `kestrel_ops.<subject>.<implementation>_<operation>`, with `cuda`, `triton`,
`library` or `flashinfer` as the implementation, has a function of the operation's name, and `unsupported(model) ->
str | None`, the reason why it cannot serve a model. `flashinfer` is selected only where it is named, and has
`prepare(model)`, which compiles what the library would compile at the first call.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from kestrel_ops import reference
from kestrel_ops.compilation.facts import KeptFacts, device_facts, files_of
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.shapes import FLOAT8, ModelShape

_FASTEST_FIRST = ("cuda", "triton", "library")
_FLASHINFER = "flashinfer"
_REFERENCE = "reference"
_OPTIONAL_PACKAGES = ("triton",)
COMPILED_AHEAD = Path(sys.prefix, "share", "kestrel-grpc", "kernels")
"""Folder of the kernels compiled ahead of time for this installation, for any number of models and cards."""

_log = logging.getLogger(__name__)


def _product_shape(x: Tensor, x_scale: Any, weight: Tensor, *others: Any) -> Tensor:
    dtype = others[-1] if isinstance(others[-1], torch.dtype) else x.dtype
    return x.new_empty(len(x), len(weight), dtype=dtype)


def _attention_shape(
    packed: Tensor, num_patches: int, num_heads: int, out_scale: float | None = None, crop_by_crop: bool = False
) -> Tensor:
    dtype = packed.dtype if out_scale is None else FLOAT8
    return packed.new_empty(len(packed), packed.shape[1] // 3, dtype=dtype)


def _turned_shapes(
    qkv: Tensor, positions: Any, cosine: Any, sine: Any, key_pages: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    key_value = key_pages.shape[1] * key_pages.shape[3]
    parts = qkv.split((qkv.shape[1] - 2 * key_value, key_value, key_value), dim=1)
    return tuple(part.unflatten(1, (-1, key_pages.shape[3])) for part in parts)


_OF_SHAPES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "scaled_linear": _product_shape,
        "scaled_linear_gelu": _product_shape,
        "scaled_linear_add": lambda *_: None,
        "crop_attention": _attention_shape,
        "rotary_write_kv": _turned_shapes,
        "rotary_decode_attention": lambda *_: None,
        "prefill_attention": lambda query, *_: query.new_empty(query.shape),
        "decode_expand": lambda *_: None,
        "decode_contract": lambda *_: None,
        "add_up_terms": lambda *_: None,
        "add_down_terms": lambda *_: None,
        "invariant_attention": lambda query, *_: query.new_empty(query.shape),
        "mixture_of_experts": lambda hidden, *_: hidden.new_empty(hidden.shape),
        "invariant_experts": lambda hidden, *_: hidden.new_empty(hidden.shape),
    }
)
"""Results without values, of operations of which libraries have implementations or definitions look at numbers."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Holds one function for each operation, which `reference` defines and documents."""

    resample: Callable[..., Any]
    hash_words: Callable[..., Any]
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
    layer_norm_linear: Callable[..., Any]
    mixture_of_experts: Callable[..., Any]
    tau_scales: Callable[..., Any]
    add_low_rank: Callable[..., Any]
    rows_by_slot: Callable[..., Any]
    add_up_terms: Callable[..., Any]
    add_down_terms: Callable[..., Any]
    philox_uniform: Callable[..., Any]
    pick_allowed: Callable[..., Any]
    advance_rows: Callable[..., Any]
    invariant_linear: Callable[..., Any]
    invariant_attention: Callable[..., Any]
    invariant_experts: Callable[..., Any]

    @classmethod
    def select(cls, device_type: str, choices: Mapping[str, str], model: ModelShape | None = None) -> Kernels:
        """Returns the fastest implementations that can serve `model` on a CUDA device; the reference on other
        devices.

        `choices` (operation → implementation) takes precedence. Implementations that cannot serve the model are
        logged with the reason. Without a `model` each counts as able to. Raises ValueError that names every
        operation or implementation of `choices` that does not exist or cannot serve the model, with the reason.
        """
        operations = [field.name for field in fields(cls)]
        unknown = [
            f"{operation}={implementation}"
            for operation, implementation in choices.items()
            if operation not in operations or not has_implementation(implementation, operation)
        ]
        if unknown:
            raise ValueError(f"no such kernels: {', '.join(unknown)}")
        refused = [
            f"{operation}={implementation}: {reason}"
            for operation, implementation in choices.items()
            if (reason := _unsupported(implementation, operation, model)) is not None
        ]
        if refused:
            raise ValueError(f"kernels that cannot serve this model: {'; '.join(refused)}")
        chosen = {
            operation: choices.get(operation) or _default(device_type, operation, model) for operation in operations
        }
        _log.debug("kernels: %s", ", ".join(f"{operation}={name}" for operation, name in chosen.items()))
        return cls(**{operation: function_of(name, operation) for operation, name in chosen.items()})

    def of_shapes(self) -> Kernels:
        """Returns the same kernels of Triton, and results without values in the place of what computes by other
        means.

        For finding out which kernels of Triton are launched with what.
        """
        chosen: dict[str, Callable[..., Any]] = {}
        for field in fields(self):
            function = getattr(self, field.name)
            launches_triton = implementation_of(function) == "triton" or getattr(
                sys.modules[function.__module__], "LAUNCHES_TRITON", False
            )
            own = function_of(_REFERENCE, field.name)
            chosen[field.name] = function if launches_triton else _OF_SHAPES.get(field.name, own)
        return Kernels(**chosen)

    def invariant(self) -> Kernels:
        """Returns the same kernels, except that a row has the same bits in any batch; for use in an
        `InvariantMode`.

        Products, attention and experts become the invariant operations. The scales of tau attention are those of
        the reference, whose products are the mode's. Other kernels treat every row alike.
        """

        def scaled_linear(
            x: Tensor, _: None, weight: Tensor, __: None, bias: Tensor | None, out_dtype: torch.dtype
        ) -> Tensor:
            return self.invariant_linear(x, weight, bias).to(out_dtype)

        def scaled_linear_add(x: Tensor, _: None, weight: Tensor, __: None, bias: Tensor, hidden: Tensor) -> None:
            hidden += self.invariant_linear(x, weight, bias)

        def scaled_linear_gelu(
            x: Tensor, _: None, weight: Tensor, __: None, bias: Tensor, out_factor: None
        ) -> Tensor:
            activated, _ = self.concat_gelu(None, self.invariant_linear(x, weight, bias), x.dtype, True)
            return activated

        def prefill_attention(query: Tensor, _: Tensor, __: Tensor, *pages_and_chunks: Any) -> Tensor:
            return self.invariant_attention(query, *pages_and_chunks)

        return replace(
            self,
            scaled_linear=scaled_linear,
            scaled_linear_add=scaled_linear_add,
            scaled_linear_gelu=scaled_linear_gelu,
            prefill_attention=prefill_attention,
            crop_attention=partial(self.crop_attention, crop_by_crop=True),
            mixture_of_experts=self.invariant_experts,
            tau_scales=reference.tau_scales,
        )

    def compilations(self, model: ModelShape) -> list[Callable[[], object]]:
        """Returns functions that compile kernels for a model which are not Triton's. They need no device."""
        modules = [sys.modules[getattr(self, field.name).__module__] for field in fields(self)]
        return [job for module in modules for job in getattr(module, "compilations", lambda _: [])(model)]

    def waiting_for_device(self) -> list[str]:
        """Returns the operations whose implementation synchronises with the device, so that no graph can capture
        them."""
        functions = {field.name: getattr(self, field.name) for field in fields(self)}
        return [
            name
            for name, function in functions.items()
            if implementation_of(function) == _FLASHINFER
            or (name in reference.WAITING_FOR_DEVICE and function is getattr(reference, name))
        ]

    def prepare(self, model: ModelShape) -> None:
        """Compiles and loads, for a model on the current device, what libraries compile at their first call.

        Takes half a minute for each operation at first, where a library has kept nothing. Raises ValueError that
        names the operation whose kernels cannot be compiled or loaded here.
        """
        for field in fields(self):
            function = getattr(self, field.name)
            if implementation_of(function) == _FLASHINFER:
                try:
                    module_of(_FLASHINFER, field.name).prepare(model)
                except Exception as error:  # of a compiler, of a build tool or of the device
                    problem = f"{field.name}={_FLASHINFER}: its kernels cannot be compiled or loaded"
                    _log.warning("%s", problem, exc_info=True)
                    raise ValueError(f"{problem}: {type(error).__name__}") from error


def implementation_of(function: Callable[..., Any]) -> str:
    """Returns which implementation a function of an operation belongs to, such as `triton`."""
    return function.__module__.rpartition(".")[2].partition("_")[0]


def function_of(implementation: str, operation: str) -> Callable[..., Any]:
    """Returns an implementation of an operation; raises ModuleNotFoundError if there is none."""
    found = reference if implementation == _REFERENCE else module_of(implementation, operation)
    return getattr(found, operation)


def module_of(implementation: str, operation: str) -> ModuleType:
    """Returns the module with an implementation of an operation; raises ModuleNotFoundError if there is none."""
    return importlib.import_module(_module_name(implementation, operation))


def has_implementation(implementation: str, operation: str) -> bool:
    """Returns True if an operation has this implementation, whether or not it can run here."""
    if implementation == _REFERENCE:
        return hasattr(reference, operation)
    if implementation not in (*_FASTEST_FIRST, _FLASHINFER):
        return False
    return importlib.util.find_spec(_module_name(implementation, operation)) is not None


def num_compilations() -> int:
    """Returns how many kernels this process has compiled, or loaded from their folder, since the first call.

    Imports nothing: where no kernel has been imported, none has been compiled.
    """
    module = sys.modules.get("kestrel_ops.compilation.triton_compilations")
    return 0 if module is None else module.compilations().count


def compiled_together(
    num_processors: int,
    limits: DeviceLimits,
    *,
    kept_in: Path | None = None,
    others: Sequence[Callable[[], object]] = (),
    may_fork: threading.Event | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> AbstractContextManager[list[Any]]:
    """Compiles Triton kernels within the block, by so many processes for a device with these limits.

    Operations are given tensors of the device `meta`. At the end the kernels are loaded onto the current device, or
    with `kept_in`, where that device need not be here, they are in this folder. The list, which is empty before,
    then has an entry for each, for `load_listed`.

    Without `kept_in` the processes also call `others`, which keep what they compile. They start once `may_fork` is
    set: no other thread may have tensors on a device then. At the end of the block, before they are waited for,
    `meanwhile` is called, which may launch no kernel of Triton.
    """
    module = _compilations()
    if module is None:
        return nullcontext([])
    return module.compiled_together(
        num_processors,
        limits,
        compiled_ahead=COMPILED_AHEAD,
        kept_in=kept_in,
        others=others,
        may_fork=may_fork,
        meanwhile=meanwhile,
    )


def kept_facts(identity: Iterable[object], packages: Iterable[ModuleType]) -> KeptFacts:
    """Keeps what earlier starts have found for a configuration, in the folder of compiled kernels.

    The facts depend on the `repr` of the values in `identity`, on the device, on torch, and on the files of
    `packages` and of this one. Without Triton nothing is kept.
    """
    module = _compilations()
    if module is None:
        return KeptFacts(None)
    files = [files_of(package) for package in (sys.modules[__package__ or ""], *packages)]
    return KeptFacts(module.folder_of((*identity, *device_facts(), files)))


def load_listed(listed: Iterable[Sequence[str]]) -> int | None:
    """Loads kernels that `compiled_together` has listed in another process; returns their number.

    Returns None where that cannot be done for all of them, as where one is no longer kept.
    """
    module = _compilations()
    return None if module is None else module.load_listed(listed)


def prepare_compilations() -> None:
    """Prepares what the first compilation would wait for. Takes half a second, in any thread."""
    if _compilations() is not None:
        importlib.import_module("kestrel_ops.compilation.triton_key").prepare()


def use_libraries(device: torch.device) -> None:
    """Loads what the first calls of torch's libraries on a CUDA device wait for.

    Takes half a second, in any thread. Raises RuntimeError if the device cannot compute.
    """
    importlib.import_module("kestrel_ops.linear.library_first_use").use_libraries(device)


def measured_products(choices: dict[str, int]) -> AbstractContextManager[None]:
    """Chooses by measurement, within the block, the algorithm of each product of cuBLASLt of a new shape.

    That waits for the device. Without it a product takes up to a few per cent longer, with the same result. What
    `choices` has is not measured; what is measured is added to them.
    """
    return importlib.import_module("kestrel_ops.linear.library_cublas_lt").measured_products(choices)


def _compilations() -> ModuleType | None:
    try:
        return importlib.import_module("kestrel_ops.compilation.triton_compilations")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _OPTIONAL_PACKAGES:
            raise
        return None


def _default(device_type: str, operation: str, model: ModelShape | None) -> str:
    *passed_over, chosen = _up_to_the_first_that_can(device_type, operation, model)
    level = logging.WARNING if chosen[0] == _REFERENCE else logging.INFO  # the reference is slow
    for name, reason in passed_over:
        _log.log(level, "kernels: %s=%s is passed over for %s: %s", operation, name, chosen[0], reason)
    return chosen[0]


def _up_to_the_first_that_can(
    device_type: str, operation: str, model: ModelShape | None
) -> Iterator[tuple[str, str | None]]:
    """Implementations in the order of speed, each with the reason why it cannot serve the model, or None."""
    for name in _FASTEST_FIRST if device_type == "cuda" else ():
        if has_implementation(name, operation):
            reason = _unsupported(name, operation, model)
            yield name, reason
            if reason is None:
                return
    yield _REFERENCE, None


def _unsupported(implementation: str, operation: str, model: ModelShape | None) -> str | None:
    """Returns why an implementation cannot serve the model; None if it can."""
    if implementation == _REFERENCE:
        return None
    try:
        module = module_of(implementation, operation)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _OPTIONAL_PACKAGES:
            raise
        return f"{error.name} is not installed"
    return None if model is None else module.unsupported(model)


def _module_name(implementation: str, operation: str) -> str:
    subject = getattr(reference, operation).__module__.rpartition(".")[0]
    return f"{subject}.{implementation}_{operation}"
