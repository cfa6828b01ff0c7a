"""Reads the tensors of a Moondream under canonical names, from either layout of names, and checks them.

Tensors are mapped from their files until
they are used, in their stored type: float8 experts keep their bytes and their scales.

Canonical names are those of the hub layout without its leading `model.`; the training layout
(`text_model.*`, `vision_encoder.*`, `region_model.*`) is renamed to them. Names of either layout may contain those
of wrappers of the model. Buffers that models compute themselves are ignored.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.checkpoint import Checkpoint
from kestrel_runtime.models.moondream.config import ConfigError, IncompleteConfig, MoondreamConfig, sections_of
from kestrel_runtime.models.moondream.weights.published import infer_config

_log = logging.getLogger(__name__)

MAX_LISTED_PROBLEMS = 20
FP8 = torch.float8_e4m3fn
_PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_LAYER = r"text_model\.transformer\.h\.(\d+)\."
_VISUAL = r"vision_encoder\.encoder\.model\.visual\."
_LINEAR = r"\.(weight|bias)"
# Training name → canonical name.
_TRAINING_NAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"text_model\.transformer\.embd\.wte\.weight", "text.wte"),
        (rf"text_model\.lm_head\.ln{_LINEAR}", r"text.post_ln.\1"),
        (rf"text_model\.lm_head\.linear{_LINEAR}", r"text.lm_head.\1"),
        (rf"{_LAYER}ln{_LINEAR}", r"text.blocks.\1.ln.\2"),
        (rf"{_LAYER}mixer\.Wqkv{_LINEAR}", r"text.blocks.\1.attn.qkv.\2"),
        (rf"{_LAYER}mixer\.out_proj{_LINEAR}", r"text.blocks.\1.attn.proj.\2"),
        (rf"{_LAYER}tau_(wq|wv|wqwv|alpha)", r"text.blocks.\1.attn.tau.\2"),
        (rf"{_LAYER}mlp\.(fc[12]){_LINEAR}", r"text.blocks.\1.mlp.\2.\3"),
        (rf"{_LAYER}gate{_LINEAR}", r"text.blocks.\1.mlp.router.\2"),
        (rf"{_LAYER}mlp\.experts\.weight", r"text.blocks.\1.mlp.fc1.weight"),
        (rf"{_LAYER}mlp\.output_experts\.weight", r"text.blocks.\1.mlp.fc2.weight"),
        (rf"{_LAYER}moe_quant\.up_scale", r"text.blocks.\1.mlp.fc1.scale"),
        (rf"{_LAYER}moe_quant\.down_scale", r"text.blocks.\1.mlp.fc2.scale"),
        (rf"{_VISUAL}patch_embed\.linear{_LINEAR}", r"vision.patch_emb.\1"),
        (rf"{_VISUAL}pos_embed", "vision.pos_emb"),
        (rf"{_VISUAL}norm{_LINEAR}", r"vision.post_ln.\1"),
        (rf"{_VISUAL}blocks\.(\d+)\.norm([12]){_LINEAR}", r"vision.blocks.\1.ln\2.\3"),
        (rf"{_VISUAL}blocks\.(\d+)\.(attn\.qkv|attn\.proj|mlp\.fc[12]){_LINEAR}", r"vision.blocks.\1.\2.\3"),
        (rf"vision_encoder\.projection\.mlp\.(fc[12]){_LINEAR}", r"vision.proj_mlp.\1.\2"),
        (r"region_model\.coordinate_features\.weight", "region.coord_features"),
        (r"region_model\.size_features\.weight", "region.size_features"),
        (rf"region_model\.coordinate_encoder{_LINEAR}", r"region.coord_encoder.\1"),
        (rf"region_model\.size_encoder{_LINEAR}", r"region.size_encoder.\1"),
        (rf"region_model\.coordinate_head{_LINEAR}", r"region.coord_decoder.\1"),
        (rf"region_model\.size_head{_LINEAR}", r"region.size_decoder.\1"),
        (rf"region_model\.coordinate_decoder\.(fc[12]){_LINEAR}", r"region.coord_decoder.\1.\2"),
        (rf"region_model\.size_decoder\.(fc[12]){_LINEAR}", r"region.size_decoder.\1.\2"),
        (rf"region_model\.ln{_LINEAR}", r"region.ln.\1"),
    )
]
_TRANSPOSED = ("region.coord_features", "region.size_features")
# Scales of a quantised key/value cache, which this engine keeps in the model's own type.
_IGNORED = re.compile(r".*\.kv_quantizer\.[kv]_scale")
# Buffers of the publisher's own model: kept between calls, or computed at construction.
_BUFFERS = re.compile(r"(?:.*\.)?(?:kv_cache\.[kv]_cache|attn_mask|freqs_cis)")
# The model within others: of the hub and of trainers, of `torch.compile`, and of training on several devices.
_WRAPPER = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)"
_OUTER = re.compile(rf"(?:(?:model|module|{_WRAPPER})\.)+")
_INNER = re.compile(rf"\.{_WRAPPER}(?=\.)")
# The states within what trainers save, in order of preference.
_STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")
_QUANTISED = re.compile(
    r".*[._](?:packed|qweight|qzeros|scales?_and_zeros|g_idx|absmax|quant_map|quant_state\..*|SCB|zero_point|weight_scale)"
)
_ADAPTER = re.compile(r".*\.lora_[AB](?:\.\w+)?\.weight|.*\.lora_embedding_[AB].*")
_SERVED_RELEASE = "use the release of 2025-06-21 (--model moondream2) or a later one"
_MAX_ECHO_CHARS, _MAX_REASON_CHARS = 120, 300
_FORMER_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The first bytes of what torch.save writes where it does not write a zip file."""
_SAVE = "save the weights alone, as torch.save(model.state_dict(), ...) does"


def load_moondream_state(checkpoint: Checkpoint) -> tuple[MoondreamConfig, dict[str, Tensor]]:
    """Returns the configuration and all tensors of `checkpoint` by canonical name, checked against each other.

    Dimensions that `config.json` omits are inferred from the tensors. Raises `CheckpointError`.
    """
    tensors = read_tensors(checkpoint.weight_files)
    try:
        config = MoondreamConfig.from_dict(_config_data(checkpoint.config, tensors))
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.name}: {error}") from error
    expected = expected_tensors(config, fp8_experts=any(tensor.dtype is FP8 for tensor in tensors.values()))
    tensors = {name: _with_unit_axes(tensor, expected.get(name)) for name, tensor in tensors.items()}
    check_tensors(tensors, expected)
    return config, tensors


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Returns all tensors of `files` by canonical name, not yet read from disk. Raises `CheckpointError`."""
    stored: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _open(file).items():
            name = _INNER.sub("", name).removeprefix("_orig_mod.")
            if name in stored:
                raise CheckpointError(f"{file}: a second tensor {name}")
            stored[name] = tensor
    unwrapped = [(_unwrapped(name), tensor) for name, tensor in stored.items()]
    kept = [(name, tensor) for name, tensor in unwrapped if _BUFFERS.fullmatch(name) is None]
    if len(kept) < len(unwrapped):
        _log.info("ignoring %d buffers that the model computes itself", len(unwrapped) - len(kept))
    _refuse_other_kinds(kept)
    if any(name.startswith("text_model.transformer.") for name, _ in kept):
        pairs = list(_from_training_layout(kept))
    elif any(name.startswith("text.blocks.") for name, _ in kept):
        pairs = kept
    else:
        some = ", ".join(name[:_MAX_ECHO_CHARS] for name in sorted(stored)[:3]) or "none at all"
        is_former = any(name.startswith(("text_model.", "vision_encoder.")) for name, _ in kept)
        hint = f"; if it is a Moondream from before 2025, {_SERVED_RELEASE}" if is_former else ""
        raise CheckpointError(f"no Moondream: neither layout's tensor names were found, but {some}{hint}")
    if not any(name.startswith("region.") for name, _ in pairs):
        text = "the checkpoint has no region model, as releases of Moondream from before 2025 and parts of a model"
        raise CheckpointError(f"{text}: {_SERVED_RELEASE}")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise CheckpointError(f"two tensors for {', '.join(twice[:MAX_LISTED_PROBLEMS])}")
    return dict(pairs)


def _unwrapped(name: str) -> str:
    outer = _OUTER.match(name)
    return name if outer is None else name[outer.end() :]


def _refuse_other_kinds(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses what is no whole model of a type that is read, each kind with what to do."""
    for name, tensor in tensors:
        shown = name[:_MAX_ECHO_CHARS]
        if _QUANTISED.fullmatch(name) or tensor.dtype in (torch.int8, torch.uint8):
            raise CheckpointError(
                f"quantised weights ({shown}) are not read: use the weights in bfloat16 that they were made of, "
                "such as --model moondream2"
            )
        if _ADAPTER.fullmatch(name):
            raise CheckpointError(
                f"an adapter ({shown}) is no model: put its folder into that of --adapters, or merge it into its "
                "model and save that"
            )


def expected_tensors(config: MoondreamConfig, *, fp8_experts: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a model of these dimensions, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for section in (_text_tensors(config, fp8_experts), _vision_tensors(config), _region_tensors(config)):
        shapes.update(section)
    return shapes


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises one `CheckpointError` that names all missing and extra tensors, wrong shapes and unsupported types."""
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in expected]
    fp8_names = {name.removesuffix("scale") + "weight" for name in expected if name.endswith(".scale")}
    for name, tensor in tensors.items():
        if name not in expected:
            continue
        if tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} has shape {list(tensor.shape)} instead of {list(expected[name])}")
        served_types = (FP8,) if name in fp8_names else _PLAIN_TYPES
        if tensor.dtype not in served_types:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in served_types)
            problems.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')} instead of {names}")
    if problems:
        listed = problems[:MAX_LISTED_PROBLEMS]
        rest = len(problems) - len(listed)
        more = f"; and {rest} more" if rest else ""
        raise CheckpointError(f"tensors that do not fit the model ({len(problems)}): {'; '.join(listed)}{more}")


def _open(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        is_zip = is_zipfile(file)
        with file.open("rb") as opened:
            if not is_zip and opened.read(len(_FORMER_MAGIC)) != _FORMER_MAGIC:
                raise CheckpointError(f"cannot read {file}: it is damaged, or torch.save has not written it")
        loaded = torch.load(file, map_location="cpu", mmap=is_zip, weights_only=True)
    except pickle.UnpicklingError as error:  # its text is long, with escapes for terminals
        raise CheckpointError(
            f"cannot read {file}: it is damaged, or has other objects than tensors; {_SAVE}"
        ) from error
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        first_line = (str(error).splitlines() or [""])[0][:_MAX_REASON_CHARS]
        shown = "".join(character for character in first_line if character.isprintable())
        raise CheckpointError(f"cannot read {file}: {shown}") from error
    state = _state_in(loaded)
    if state is None:
        raise CheckpointError(f"{file} is not a flat mapping of names to tensors; {_SAVE}")
    return {name: tensor.detach() for name, tensor in state.items()}


def _state_in(loaded: object) -> Mapping[str, Tensor] | None:
    """Returns the names and tensors of what a `.pt` file holds; None if it holds none."""
    candidates = [loaded]
    if isinstance(loaded, Mapping):
        candidates += [loaded[key] for key in _STATE_KEYS if key in loaded]
    for state in candidates:
        if isinstance(state, Mapping) and all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
        ):
            return state
    return None


def _from_training_layout(stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    num_ignored = 0
    for name, tensor in stored:
        if _IGNORED.fullmatch(name):
            num_ignored += 1
            continue
        canonical = canonical_name(name)
        if canonical.endswith(".tau.wqwv"):
            base = canonical.removesuffix("wqwv")
            wq, wv = torch.atleast_1d(tensor).tensor_split(2)
            yield from ((f"{base}wq", wq), (f"{base}wv", wv))
        elif canonical in _TRANSPOSED and tensor.ndim == 2:
            yield canonical, tensor.T.contiguous()
        else:
            yield canonical, tensor
    if num_ignored:
        _log.info("ignoring %d scales of a quantised key/value cache", num_ignored)


def canonical_name(name: str) -> str:
    """Returns the canonical name of a tensor of either layout; a name of none is returned as it is."""
    for pattern, replacement in _TRAINING_NAMES:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(replacement)
    return name  # kept, so that it is reported as unexpected


def _config_data(config: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    given = sections_of(config)
    try:
        MoondreamConfig.from_dict(given)
    except IncompleteConfig:
        pass
    else:
        return given
    inferred = infer_config({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    own = given.get("tokenizer", {})
    if isinstance(own, Mapping) and any(
        own.get(key, value) != value for key, value in inferred["tokenizer"].items() if key in ("bos_id", "eos_id")
    ):
        raise CheckpointError(
            "config.json has the ids of the tokenizer of releases before 2025-06-19, which are not served: "
            f"{_SERVED_RELEASE}"
        )
    _log.info("dimensions follow from the tensors where config.json gives none")
    # Each field of config.json takes precedence.
    merged: dict[str, Any] = {}
    for section, values in inferred.items():
        own = given.get(section, {})
        merged[section] = {**values, **own} if isinstance(own, Mapping) else own
    return merged


def _with_unit_axes(tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Returns `tensor` in `shape` if they differ only in axes of length 1, as the layouts do; else unchanged."""
    if shape is None or [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
        return tensor
    return tensor.reshape(tuple(shape))


def _text_tensors(config: MoondreamConfig, fp8_experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    text = config.text
    yield "text.wte", (text.vocab_size, text.dim)
    yield from _norm("text.post_ln", text.dim)
    yield from _linear("text.lm_head", text.vocab_size, text.dim)
    for layer in range(text.n_layers):
        block = f"text.blocks.{layer}"
        yield from _norm(f"{block}.ln", text.dim)
        yield from _linear(f"{block}.attn.qkv", text.qkv_dim, text.dim)
        yield from _linear(f"{block}.attn.proj", text.dim, text.dim)
        if text.tau_attn:
            yield f"{block}.attn.tau.wq", (text.n_heads, text.qkv_dim)
            yield f"{block}.attn.tau.wv", (text.n_heads, text.qkv_dim)
            yield f"{block}.attn.tau.alpha", (text.n_heads,)
        if text.moe is None or not text.is_moe_layer(layer):
            yield from _mlp(f"{block}.mlp", text.dim, text.ff_dim, text.dim)
            continue
        moe = text.moe
        yield from _linear(f"{block}.mlp.router", moe.num_experts, text.dim)
        # The first half of fc1's rows is activated, the second gates it.
        yield f"{block}.mlp.fc1.weight", (moe.num_experts, 2 * moe.expert_inner_dim, text.dim)
        yield f"{block}.mlp.fc2.weight", (moe.num_experts, text.dim, moe.expert_inner_dim)
        if fp8_experts:
            yield f"{block}.mlp.fc1.scale", (moe.num_experts, 2 * moe.expert_inner_dim)
            yield f"{block}.mlp.fc2.scale", (moe.num_experts, text.dim)


def _vision_tensors(config: MoondreamConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision = config.vision
    dim = vision.enc_dim
    yield from _linear("vision.patch_emb", dim, vision.in_channels * vision.enc_patch_size**2)
    yield "vision.pos_emb", (1, vision.num_image_tokens, dim)
    for layer in range(vision.enc_n_layers):
        block = f"vision.blocks.{layer}"
        yield from _norm(f"{block}.ln1", dim)
        yield from _linear(f"{block}.attn.qkv", 3 * dim, dim)
        yield from _linear(f"{block}.attn.proj", dim, dim)
        yield from _norm(f"{block}.ln2", dim)
        yield from _mlp(f"{block}.mlp", dim, vision.enc_ff_dim, dim)
    yield from _norm("vision.post_ln", dim)
    yield from _mlp("vision.proj_mlp", 2 * dim, vision.proj_inner_dim, vision.proj_out_dim)


def _region_tensors(config: MoondreamConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    region = config.region
    # A feature is the cosine and the sine of one column.
    yield "region.coord_features", (1, region.coord_feat_dim // 2)
    yield "region.size_features", (2, region.size_feat_dim // 2)
    yield from _linear("region.coord_encoder", region.dim, region.coord_feat_dim)
    yield from _linear("region.size_encoder", region.dim, region.size_feat_dim)
    for name, out_dim in (("coord_decoder", region.coord_out_dim), ("size_decoder", region.size_out_dim)):
        if region.decoder_arch == "mlp":
            assert region.inner_dim is not None  # checked by MoondreamConfig
            yield from _mlp(f"region.{name}", region.dim, region.inner_dim, out_dim)
        else:
            yield from _linear(f"region.{name}", out_dim, region.dim)
    if region.use_ln:
        yield from _norm("region.ln", region.dim)


def _norm(name: str, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (dim,)
    yield f"{name}.bias", (dim,)


def _linear(name: str, out_dim: int, in_dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out_dim, in_dim)
    yield f"{name}.bias", (out_dim,)


def _mlp(name: str, in_dim: int, inner_dim: int, out_dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _linear(f"{name}.fc1", inner_dim, in_dim)
    yield from _linear(f"{name}.fc2", out_dim, inner_dim)
