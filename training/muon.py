"""Muon: momentum steps made orthogonal, for matrices; and the split of a model between it and AdamW.

Source: the published description of the method by Keller Jordan and others (2024).
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NS_STEPS = 5


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions, or three where the first counts matrices. Equal shapes step together."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override] nobody gives one
        """One step from the gradients that stand."""
        for group in self.param_groups:
            by_shape: defaultdict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.shape[-2:])].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_alike(parameters, group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5, group)

    def _step_alike(self, parameters: list[Tensor], lr: float, group: dict[str, Any]) -> None:
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum, gradient = state["momentum"], parameter.grad
            assert gradient is not None, "chosen for having one"
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            updates.append(gradient.lerp(momentum, _MOMENTUM).reshape(-1, *parameter.shape[-2:]))
        steps = _orthogonal(torch.cat(updates)).split([len(update) for update in updates])
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(step.view_as(parameter).to(parameter.dtype), alpha=-lr)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix of a stack with its singular values brought near 1, by Newton and Schulz's iteration."""
    a, b, c = _NS_COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NS_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those for Muon and those for AdamW: embeddings, heads, norms, biases and everything small."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = name.endswith(".weight") and parameter.ndim >= 2 and ("blocks." in name or "proj_mlp" in name)
        (matrices if is_matrix and "router" not in name else others).append(parameter)
    return matrices, others
