"""From the host to the device, without making the host wait for what the device does."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(data: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the host as a tensor of `dtype` there. Only copies from pinned memory leave the host alone."""
    tensor = torch.as_tensor(data, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
