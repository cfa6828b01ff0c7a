"""Pictures of our own that show how large values grow inside the vision encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_runtime.models.moondream.config import VisionConfig

_SEED = 1


def calibration_tiles(config: VisionConfig, device: torch.device) -> Tensor:
    """uint8 tiles [6, side, side, channels]: noise, fine and coarse, a slope, stripes, white and black.

    Between even areas, edges and noise lies what cameras and screens show.
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
