"""Computes a mixture of gated experts: routed, multiplied and summed on the device, each chosen expert read
once."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import has_dependent_launch
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.triton_adapters import addition_to_rows
from kestrel_ops.experts.triton_int4_products import contract_int4, expand_int4
from kestrel_ops.experts.triton_int4_single_token import fits_one_token_int4, mix_one_int4
from kestrel_ops.experts.triton_launch_configs import (
    ONE_TOKEN,
    ONE_TOKEN_INT4,
    ExpertsConfig,
    OneTokenConfig,
    config_for,
    int4_config_for,
)
from kestrel_ops.experts.triton_products import combine, contract, expand, quantised_rows
from kestrel_ops.experts.triton_routing import route
from kestrel_ops.experts.triton_single_token import fits_one_token, mix_one
from kestrel_ops.lora.reference import ExpertAdapters
from kestrel_ops.shapes import FLOAT8, ModelShape

_MOST_EXPERTS = 1024  # a program holds the logits of its tokens in registers


def mixture_of_experts(
    hidden: Tensor,  # [T, dim]
    router_logits: Tensor,  # [T, E]
    up: Tensor,  # [E, 2 * inner, dim]: first the activated half, then the gate half
    down: Tensor,  # [E, dim, inner]
    experts_per_token: int,
    up_scale: Tensor | None = None,  # [E, 2 * inner] float32, where `up` is float8
    down_scale: Tensor | None = None,  # [E, dim] float32, where `down` is float8
    adapters: ExpertAdapters | None = None,
    positions: Tensor | None = None,
    config: ExpertsConfig | OneTokenConfig | None = None,  # None: that which the number of tokens asks for
) -> Tensor:  # [T, dim]
    """Computes a mixture of experts, so that a CUDA graph can capture it.

    Same contract as `reference.mixture_of_experts`. Between the products values have the type of `hidden`; with
    float8 experts and a `hidden` of 16 bits the inputs of both products are quantised to float8, too, except for
    one token and on devices without float8, which convert the experts. A token alone is never padding.
    """
    num_tokens, dim = hidden.shape
    if num_tokens == 0:
        return torch.empty_like(hidden)
    hidden, router_logits = hidden.contiguous(), router_logits.contiguous()
    assert up.is_contiguous()
    assert down.is_contiguous()
    limits = DeviceLimits.of(hidden.device)
    is_int4 = up.dtype == torch.uint8
    quantises = (is_int4 or up.dtype == FLOAT8) and hidden.dtype != torch.float32 and limits.has_float8
    if up.dtype == FLOAT8 and not limits.has_float8:
        up, down = up.view(torch.uint8), down.view(torch.uint8)
    operand = FLOAT8 if quantises else hidden.dtype
    is_dependent = has_dependent_launch(hidden)
    if config is None and num_tokens == 1 and adapters is None:
        fits = (
            fits_one_token_int4(up, down, experts_per_token) if is_int4 else fits_one_token(up, experts_per_token)
        )
        config = (ONE_TOKEN_INT4 if is_int4 else ONE_TOKEN) if fits else None
    if isinstance(config, OneTokenConfig):
        return (mix_one_int4 if is_int4 else mix_one)(
            *(hidden, router_logits, up, down, experts_per_token, up_scale, down_scale, config),
            is_dependent=is_dependent,
        )
    config = config or (int4_config_for if is_int4 else config_for)(
        num_tokens, len(up), experts_per_token, operand, limits
    )
    block = config.block_tokens
    routing = route(
        *(hidden, router_logits, experts_per_token, block, positions),
        quantises=quantises,
        is_dependent=is_dependent,
    )
    added = None
    if adapters is not None:
        added = addition_to_rows(
            *(routing, hidden, None, dim, adapters.up, adapters.slots, block),
            is_by_place=False,
            is_dependent=is_dependent,
        )
    rounds = quantises and config.quantises_rows
    inner = (expand_int4 if is_int4 else expand)(
        *(routing, up, up_scale, added, config.expand, block, hidden.dtype if rounds else operand),
        is_dependent=is_dependent,
    )
    if rounds:
        inner = quantised_rows(inner, is_dependent=is_dependent)
    if adapters is not None:
        added = addition_to_rows(
            *(routing, *inner, adapters.down, adapters.slots, block),
            is_by_place=True,
            is_dependent=is_dependent,
        )
    rows = (contract_int4 if is_int4 else contract)(
        *(routing, inner, down, down_scale, added, config.contract, block, hidden.dtype), is_dependent=is_dependent
    )
    return combine(routing, rows, is_dependent=is_dependent)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None or not model.text.num_experts:
        return None
    if model.text.num_experts > _MOST_EXPERTS:
        return f"{model.text.num_experts} experts are more than {_MOST_EXPERTS}"
    return unsupported_device(model) or unsupported_rows(model)
