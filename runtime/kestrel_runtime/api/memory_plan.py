"""How an engine divides the memory of its device. Plain numbers, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of the memory at start. The sum of all terms is `total_bytes`.

    On a CUDA device the memory is the device's; elsewhere it is what the host and its control groups allow.
    """

    total_bytes: int
    utilization: float
    """Share of the memory that may be taken."""
    weight_bytes: int
    """Weights in the layout that runs, with the static buffers that belong to them."""
    cache_bytes: int
    """Key-value cache."""
    activation_bytes: int
    """Activations of the largest step that runs without a captured graph, and what penalties keep of sequences."""
    graph_bytes: int
    """Captured CUDA graphs and the pools that they compute in; 0 without graphs."""
    image_bytes: int
    """Images and their tiles: on a CUDA device those that are there, on the host all that are decoded."""
    other_bytes: int
    """Taken by others: other processes, and the context and the libraries of this one."""
    margin_bytes: int
    """Kept free for static inputs and for what drivers allocate later."""
    free_bytes: int
    """Planned for nothing."""
    image_cache_bytes: int = 0
    """Image embeddings that are kept for later requests."""
    adapter_bytes: int = 0
    """Slots of adapters."""

    def terms(self) -> list[tuple[str, int]]:
        """Name and bytes of each term, in the order of a table."""
        return [
            ("weights", self.weight_bytes),
            ("KV cache", self.cache_bytes),
            ("activations", self.activation_bytes),
            ("CUDA graphs", self.graph_bytes),
            ("images", self.image_bytes),
            ("image cache", self.image_cache_bytes),
            ("adapters", self.adapter_bytes),
            ("other processes, context and libraries", self.other_bytes),
            ("margin", self.margin_bytes),
            ("free", self.free_bytes),
        ]

    def table(self) -> str:
        """A line for each term, in GiB, and one for the total."""
        rows = [*self.terms(), ("total", self.total_bytes)]
        return "\n".join(f"{name:40} {num_bytes / _GIB:8.2f} GiB" for name, num_bytes in rows)
