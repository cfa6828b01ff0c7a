"""Synthetic pictures for measuring the range of values inside the vision encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_runtime.models.moondream.config import VisionConfig

_SEED = 1


def calibration_tiles(config: VisionConfig, device: torch.device) -> Tensor:
    """uint8 tiles [6, side, side, channels]: fine and coarse noise, a gradient, stripes, white and black.

    Photographs and screenshots consist of uniform areas, edges and noise, which these tiles cover.
    """
    side, channels = config.crop_size, config.in_channels
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randint(0, 256, (side, side, channels), generator=generator)
    coarse = noise[: side // 14 + 1, : side // 14 + 1].repeat_interleave(14, 0).repeat_interleave(14, 1)
    slope = torch.linspace(0, 255, side)[:, None, None].expand(side, side, channels)
    stripes = (torch.arange(side) // 7 % 2 * 255)[None, :, None].expand(side, side, channels)
    white = torch.full((side, side, channels), 255)
    pictures = (noise, coarse[:side, :side], slope, stripes, white, torch.zeros_like(white))
    return torch.stack([picture.to(torch.uint8) for picture in pictures]).to(device)
