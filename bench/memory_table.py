"""Which published models start with default settings in how much memory of a GPU? Computed, without a GPU.

For each model, precision and limit (`--memory-limit`), by the plan of an engine: whether a server starts, and how
many requests with an image its key-value cache holds at once. Weights come from the sizes of the models; context,
libraries and buffers are what they took on an H200; activations are estimated from above, where an engine on a GPU
measures them.
"""

from types import SimpleNamespace
from typing import Any

import torch

from kestrel_ops import INT4_GROUP
from kestrel_runtime.api.config import MIB, EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.memory.plan import MemoryReading, plan_memory
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.memory import estimated_step_bytes, memory_needs
from kestrel_runtime.models.moondream.weights.checkpoint import expected_tensors
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2, MOONDREAM_3
from kestrel_runtime.scheduling.limits import StepBounds

GIBS = (8, 12, 16, 24, 48, 80)
_CONTEXT_BYTES = 689 * MIB
_IMAGE_REQUEST_TOKENS = 746 + 6
_MOONDREAM_2_IN_FLOAT8 = 2496 * MIB  # with buffers, as it runs
_BLOCKS = ("text.blocks.", "vision.blocks.")
_INT4_BYTES = 0.5 + 2 / INT4_GROUP


def weight_bytes(config: MoondreamConfig, *, experts: float, blocks: int) -> int:
    """Bytes of all weights: so many for one of experts and of the other matrices of blocks, else two."""
    total = 0
    for name, shape in expected_tensors(config, fp8_experts=False).items():
        count = 1
        for size in shape:
            count *= size
        is_matrix = len(shape) > 1 and name.startswith(_BLOCKS) and ".router" not in name
        total += round(count * (experts if len(shape) == 3 else blocks if is_matrix else 2))
    return total


def cell(config: MoondreamConfig, settings: EngineConfig, loaded: int, running: int, gib: int) -> str:
    """Requests with an image at once, or "–" where a server does not start."""
    total = gib * 1024 * MIB
    device = torch.device("cuda")
    usable = MemoryReading(total, total - _CONTEXT_BYTES - loaded, loaded, is_host=False).usable_bytes(
        settings.memory_utilization
    )
    bounds = StepBounds.of(settings, "cuda", usable)
    reading = MemoryReading(total, max(total - _CONTEXT_BYTES - running, 0), running, is_host=False)
    model: Any = SimpleNamespace(config=config, device=device, dtype=torch.bfloat16)  # all that needs depend on
    needs = memory_needs(
        model,
        settings,
        bounds,
        step_bytes=estimated_step_bytes(config, bounds, 2),
        available_bytes=reading.available_bytes,
        with_graphs=True,
        host_image_bytes=0,
    )
    try:
        num_pages, _ = plan_memory(reading, needs, settings.memory_utilization)
    except CheckpointError:
        return "–"
    requests = num_pages // -(-_IMAGE_REQUEST_TOKENS // settings.page_size)
    return f"{min(requests, bounds.max_batch_size)} of {bounds.max_batch_size}"


def main() -> None:
    """Print the table."""
    print(f"| requests with an image at once | {' | '.join(f'{gib} GiB' for gib in GIBS)} |")
    print(f"|---|{'---|' * len(GIBS)}")
    float8 = EngineConfig(kv_dtype="float8")
    buffers = _MOONDREAM_2_IN_FLOAT8 - weight_bytes(MOONDREAM_2, experts=1, blocks=1)
    for name, config, has_experts in (("Moondream 2", MOONDREAM_2, False), ("Moondream 3", MOONDREAM_3, True)):
        stored = weight_bytes(config, experts=2, blocks=2)
        rows = [("bfloat16", EngineConfig(), stored, stored)]
        formats = {"float8": 1.0, "int4": _INT4_BYTES} if has_experts else {}
        for name_of_format, size in formats.items():
            stored = weight_bytes(config, experts=size, blocks=2)
            rows.append((f"{name_of_format} experts", EngineConfig(), stored, stored))
            running = weight_bytes(config, experts=size, blocks=1) + buffers
            what = "all float8" if name_of_format == "float8" else f"{name_of_format} experts, else float8"
            rows.append((what, float8, stored, running))
        if not has_experts:
            rows.append(("all float8", float8, stored, weight_bytes(config, experts=1, blocks=1) + buffers))
        for precision, settings, loaded, running in rows:
            cells = [cell(config, settings, loaded, running, gib) for gib in GIBS]
            print(f"| {name}, {precision}: {running / 2**30:.1f} GiB of weights | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
