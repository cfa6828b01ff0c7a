"""Computes a mixture of gated experts: on Hopper, float8 experts multiply more than one token by products of
their own."""

from __future__ import annotations

from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import has_dependent_launch
from kestrel_ops.experts.cuda_products import WarpgroupConfig, can_run, config_for, contract, expand
from kestrel_ops.experts.cuda_routing import can_route, route, routing_source
from kestrel_ops.experts.triton_mixture_of_experts import mixture_of_experts as triton_mixture
from kestrel_ops.experts.triton_mixture_of_experts import unsupported as triton_unsupported
from kestrel_ops.experts.triton_products import combine, quantised_rows
from kestrel_ops.lora.reference import ExpertAdapters
from kestrel_ops.shapes import FLOAT8, ModelShape

LAUNCHES_TRITON = True


def mixture_of_experts(
    hidden: Tensor,  # [T, dim]
    router_logits: Tensor,  # [T, E]
    up: Tensor,  # [E, 2 * inner, dim]
    down: Tensor,  # [E, dim, inner]
    experts_per_token: int,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
    positions: Tensor | None = None,
    config: WarpgroupConfig | None = None,  # None: that which the number of tokens asks for
) -> Tensor:  # [T, dim]
    """Computes a mixture of float8 experts. Same contract as `reference.mixture_of_experts`.

    Triton's implementation serves one token, adapters, other types, other sizes and other devices.
    """
    is_dependent = has_dependent_launch(hidden)
    config = config or config_for(len(hidden) * experts_per_token / len(up))
    if (
        config is None
        or adapters is not None
        or up.dtype != FLOAT8
        or up_scale is None
        or down_scale is None
        or not can_route(hidden, router_logits, experts_per_token)
        or not can_run(
            *(up, experts_per_token, config, hidden.dtype),
            (routing_source(hidden, router_logits, experts_per_token, positions, is_dependent=is_dependent),),
            is_dependent=is_dependent,
        )
    ):
        return triton_mixture(
            *(hidden, router_logits, up, down, experts_per_token, up_scale, down_scale, adapters, positions)
        )
    for stack in (up, down):
        assert stack.is_contiguous()
        assert stack.device.type == "meta" or stack.data_ptr() % 16 == 0  # bytes of one load
    routing = route(
        *(hidden.contiguous(), router_logits.contiguous(), experts_per_token, config.block_tokens, positions),
        is_dependent=is_dependent,
    )
    inner = expand(routing, up, up_scale, config, hidden.dtype, is_dependent=is_dependent)
    if not config.is_few:
        inner = quantised_rows(inner, is_dependent=is_dependent)
    rows = contract(routing, inner, down, down_scale, config, hidden.dtype, is_dependent=is_dependent)
    return combine(routing, rows, is_dependent=is_dependent)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None or not model.text.num_experts:
        return None
    if model.capability != (9, 0):
        return "its products are written for compute capability 9.0"
    return triton_unsupported(model)
