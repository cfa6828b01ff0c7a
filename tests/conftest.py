"""What holds for every test: generated examples are the same in every run, and no clock judges them."""

import os

import torch
from hypothesis import settings

# Read when a kernel is defined, so before anything imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A red run then speaks of the change, not of the draw or of a busy machine.
settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
settings.load_profile("reproducible")

# The models of the tests are so small that threads inside an operation cost more than they save.
torch.set_num_threads(1)
