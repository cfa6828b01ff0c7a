"""The angles of the rotary embedding, and the position term of tau attention, as tables."""

import torch
from torch import Tensor


def rotary_tables(
    rotary_dim: int, max_context: int, theta: float, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * theta^(-2i / rotary_dim), each [max_context, rotary_dim / 2], float32."""
    dims = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (theta ** (dims / rotary_dim))
    angles = torch.arange(max_context, dtype=torch.float32, device=device)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()
