"""Uses torch's libraries on a device once, in a thread, before the engine needs them.

A library loads its kernels and takes its memory at the first call, half a second in all for what a model uses.
torch releases the interpreter's lock meanwhile, so that other threads can import modules.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding_bag, layer_norm, linear

from kestrel_ops.linear.library_scaled_linear import scaled_linear
from kestrel_ops.sampling.reference import sample
from kestrel_ops.shapes import FLOAT8

_NUM_CHOICES = 51_200
"""Like a vocabulary: rows of this length are sorted by other kernels than short ones."""
_SIZE = 64
_HAS_FLOAT8 = (8, 9)


@torch.inference_mode()
def use_libraries(device: torch.device) -> None:
    """Computes products, norms, sums and samples of a few numbers on a CUDA device, and waits for them.

    Raises RuntimeError where one of them cannot be computed there.
    """
    rows = torch.arange(_SIZE, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.rand(_SIZE, _SIZE, device=device).to(dtype)
        layer_norm(linear(x, x, x[0]), (_SIZE,), x[0], x[0])
        embedding_bag(rows, x, rows[::2].contiguous(), mode="mean")
        x[rows] = x.flip(0)
        x.index_copy_(0, rows, x[rows])
    for num_rows in (1, _SIZE):
        logits = torch.rand(num_rows, _NUM_CHOICES, device=device)
        logits = logits.masked_fill(logits > 2.0, float("-inf"))
        ones = torch.ones(num_rows, device=device)
        ids = sample(logits, ones, ones, ones / 2)
        torch.cat((torch.stack((ids, ids), dim=1).float(), ones[:, None]), dim=1)
    if torch.cuda.get_device_capability(device) >= _HAS_FLOAT8:
        low, one = x.to(FLOAT8), torch.ones(1, 1, device=device)
        scaled_linear(low, one, low, one[0], x[0], torch.bfloat16)
    torch.cuda.synchronize(device)
