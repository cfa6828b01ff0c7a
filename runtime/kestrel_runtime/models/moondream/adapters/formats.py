"""Reads the tensors of an adapter under the names of our targets, from the layouts in which Moondream's come.

| layout | names |
|---|---|
| PEFT | `base_model.model.….lora_A.weight`, modules named as in a checkpoint, and `adapter_config.json` |
| finetunes of the model maker | `dense.L.up_a`, `moe.J.down_b` and so on, for the MLPs alone |
| variants of the model maker | `text_model.transformer.h.L.mixer.Wqkv.….A` and `….B` |

Every tensor must be used, every pair complete, every shape right, and every number finite.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kestrel_runtime.adapters.files import AdapterFiles
from kestrel_runtime.api.errors import AdapterInvalid
from kestrel_runtime.models.moondream.adapters.peft_config import PeftConfig
from kestrel_runtime.models.moondream.adapters.slabs import AdapterWeights, Factors, TargetShape, target_shapes
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.weights.checkpoint import canonical_name

_MAX_LISTED = 20
_MAX_ECHO_CHARS = 120
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PEFT = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight", re.ASCII)
_FINETUNE = re.compile(
    r"(?:lora_state_dict\.|_text\.|text_lora\.)*(?P<kind>dense|moe)\.(?P<number>\d{1,4})\.(?P<matrix>up|down)_(?P<side>[ab])"
)
_VARIANT = re.compile(r"(?P<module>text(?:_model)?\.[\w.]+?)(?:\.parametrizations\.weight\.0)?\.(?P<side>[AB])")
_OF_IMAGE_ENCODER = re.compile(r"base_model\.model\.(model\.)?(vision|vision_encoder)\.", re.ASCII)
PEFT_TARGETS = r".*text.*\.(attn\.(qkv|proj)|mlp\.(fc1|fc2))"
"""The modules that PEFT may change. Those of the image encoder end alike, and have no `text` in their names."""
_CONFIGURED = "r or rank_pattern of adapter_config.json"
_MATRIX_OF = {"up": "mlp.fc1", "down": "mlp.fc2"}
_EXPERTS_LAYOUT_OF_PEFT = (0, 19)
"""The version from which PEFT reads 3-D weights as [experts, out, in]; earlier ones read [experts, in, out]."""


class _Side(NamedTuple):
    """The target and the half of it that a tensor holds."""

    target: str
    side: str
    """A or B."""
    module: str = ""
    """The name in a file of PEFT, without `base_model.model.`."""


def read_adapter(files: AdapterFiles, config: TextConfig, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Returns the checked weights of an adapter, as `dtype`. Raises `AdapterInvalid` with every problem."""
    problems: list[str] = []
    expected = target_shapes(config, max_rank)
    peft = None if files.config is None else PeftConfig.read(files.config, problems)
    place = _place_of_peft if peft is not None else _place_of_maker(files.tensors, config)
    pairs: dict[str, dict[str, tuple[str, Tensor]]] = {}
    modules: dict[str, str] = {}
    num_of_encoder = 0
    for name, tensor in files.tensors.items():
        found = place(name)
        if peft is not None and _OF_IMAGE_ENCODER.match(name):
            num_of_encoder += 1
        elif found is None or found.target not in expected:
            problems.append(f"unexpected {name[:_MAX_ECHO_CHARS]}")
        elif found.side in (own := pairs.setdefault(found.target, {})):
            if not torch.equal(own[found.side][1], tensor):  # one format has names that mean the same
                problems.append(f"{name[:_MAX_ECHO_CHARS]} and {own[found.side][0]} are for one target and differ")
        else:
            own[found.side] = (name[:_MAX_ECHO_CHARS], tensor)
            modules.setdefault(found.target, found.module)
    if peft is not None:
        peft.check_patterns(modules.values(), problems)
    factors: dict[str, Factors] = {}
    for target, own in pairs.items():
        checked = _checked(target, own, expected[target], peft, modules[target], problems)
        if checked is not None:
            factors[target] = _converted(target, checked, dtype, problems)
    if num_of_encoder:
        problems.insert(
            0,
            f"tensors of the image encoder: {num_of_encoder}; adapters change the decoder alone, so train with "
            f'target_modules=r"{PEFT_TARGETS}"',
        )
    if not files.tensors:
        problems.append("has no tensors")
    if problems:
        num_hidden = len(problems) - _MAX_LISTED
        more = (f"and {num_hidden} more problems",) if num_hidden > 0 else ()
        raise AdapterInvalid(files.name, (*problems[:_MAX_LISTED], *more))
    is_variant = place is _place_of_variant
    return AdapterWeights(factors, reads_block_input=is_variant)


def _place_of_peft(name: str) -> _Side | None:
    match = _PEFT.fullmatch(name)
    if match is None:
        return None
    module = match["module"]
    return _Side(_target(module.removeprefix("model.")), match["side"], module)


def _place_of_variant(name: str) -> _Side | None:
    match = _VARIANT.fullmatch(name)
    return None if match is None else _Side(_target(match["module"]), match["side"])


def _place_of_maker(tensors: Mapping[str, Tensor], config: TextConfig) -> Callable[[str], _Side | None]:
    """Returns the layout that most names belong to: the tensors without a place are then reported as unexpected."""
    num_variant = sum(_VARIANT.fullmatch(name) is not None for name in tensors)
    if num_variant > sum(_FINETUNE.fullmatch(name) is not None for name in tensors):
        return _place_of_variant

    def place_of_finetune(name: str) -> _Side | None:
        match = _FINETUNE.fullmatch(name)
        if match is None:
            return None
        layer = int(match["number"])
        if match["kind"] == "moe":
            layer += config.n_layers if config.moe is None else config.moe.start_layer
        elif layer < config.n_layers and config.is_moe_layer(layer):
            return None
        return _Side(f"blocks.{layer}.{_MATRIX_OF[match['matrix']]}", match["side"].upper())

    return place_of_finetune


def _target(module: str) -> str:
    """Returns the target of a module in either layout of checkpoints; some other name for what is no target."""
    weight = canonical_name(f"{module}.weight")
    return weight.removesuffix(".weight").removeprefix("text.") if weight.startswith("text.") else module


def _checked(
    target: str,
    own: Mapping[str, tuple[str, Tensor]],
    shape: TargetShape,
    peft: PeftConfig | None,
    module: str,
    problems: list[str],
) -> Factors | None:
    """Returns A and B in our layout, the scale included; None where they do not fit."""
    missing = [side for side in "AB" if side not in own]
    if missing:
        problems.append(f"missing {missing[0]} of {target}")
        return None
    (a_name, a), (b_name, b) = own["A"], own["B"]
    wrong_types = [
        f"{name} is {str(tensor.dtype).removeprefix('torch.')} instead of float32, bfloat16 or float16"
        for name, tensor in ((a_name, a), (b_name, b))
        if tensor.dtype not in _TYPES
    ]
    if wrong_types:
        problems += wrong_types
        return None
    fits = list(_layouts(a, b, shape, peft))
    if len(fits) != 1:
        kind = "fit in two ways; PEFT's version would decide which is meant" if fits else "do not fit"
        sizes = f"{shape.num_experts} experts of " if shape.num_experts else ""
        problems.append(
            f"{a_name} {list(a.shape)} and {b_name} {list(b.shape)} {kind} {target}: "
            f"{sizes}{shape.in_dim} inputs and {shape.out_dim} outputs"
        )
        return None
    factors = fits[0]
    rank = factors.a.shape[-2]
    if not 0 < rank <= shape.max_rank:
        problems.append(f"{a_name}: rank {rank} is not from 1 to {shape.max_rank}{_of_rank_flag(shape)}")
        return None
    if peft is None:
        return factors
    configured_rank = peft.rank_of(module, is_stack=shape.num_experts is not None)
    if configured_rank not in (None, rank):
        problems.append(f"{a_name}: has rank {rank}, and {_CONFIGURED} says {configured_rank}")
        return None
    return factors._replace(b=factors.b.float() * peft.scale_of(module, rank))


def _layouts(a: Tensor, b: Tensor, shape: TargetShape, peft: PeftConfig | None) -> Iterator[Factors]:
    """Yields the ways in which two tensors fit a target."""
    experts, ins, outs = shape.num_experts, shape.in_dim, shape.out_dim
    if experts is None:
        if a.ndim == b.ndim == 2 and (a.shape[1], b.shape[0]) == (ins, outs) and a.shape[0] == b.shape[1]:
            yield Factors(a, b.T)
    elif a.ndim == b.ndim == 3:
        if a.shape[::2] == (experts, ins) and b.shape[:2] == (experts, outs) and a.shape[1] == b.shape[2]:
            yield Factors(a, b.transpose(1, 2))
    elif peft is not None and a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] and a.shape[0] % experts == 0:
        rank = a.shape[0] // experts
        by_expert = a.reshape(experts, rank, a.shape[1])  # the rows of an expert are together
        by_rank = b.reshape(b.shape[0], rank, experts).permute(2, 1, 0)  # the columns of a rank are together
        knows_version = ins != outs or peft.version is not None
        is_new = peft.version is not None and peft.version >= _EXPERTS_LAYOUT_OF_PEFT
        sizes = (a.shape[1], b.shape[0])
        if sizes == (ins, outs) and (ins != outs or is_new or not knows_version):
            yield Factors(by_expert, by_rank)
        if sizes == (outs, ins) and (ins != outs or not is_new or not knows_version):
            yield Factors(by_rank, by_expert)


def _converted(target: str, factors: Factors, dtype: torch.dtype, problems: list[str]) -> Factors:
    converted = Factors(*(tensor.to(dtype).contiguous() for tensor in factors))
    for side, tensor in zip("AB", converted, strict=True):
        if not bool(tensor.isfinite().all()):
            name = str(dtype).removeprefix("torch.")
            problems.append(f"{side} of {target} has numbers that are not finite, or not as {name}")
    return converted


def _of_rank_flag(shape: TargetShape) -> str:
    return " for each expert" if shape.num_experts else ""
