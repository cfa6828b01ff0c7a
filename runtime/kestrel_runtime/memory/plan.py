"""Divides the memory of a device: how many pages the key-value cache gets after everything else.

    pages = floor((usable - activations - graphs - images - image cache - crop cache - adapters - margin)
                  / bytes of a page)

On a CUDA device `usable` is utilization × total - used now, by all processes. On the host it is utilization ×
available, since other programs need memory of the host too. Callers give the needs of a model as plain numbers.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from kestrel_runtime.api.config import MIB
from kestrel_runtime.api.engine import MemoryPlan
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.memory.host_limits import available_memory_bytes, total_memory_bytes

MARGIN_BYTES = 256 * MIB
_CACHED_IMAGES_ON_DEVICE, _CACHED_IMAGES_ON_HOST, _IMAGE_CACHE_SHARE = 256, 32, 16
_CACHED_CROPS_ON_DEVICE, _CACHED_CROPS_ON_HOST, _CROP_CACHE_SHARE = 1024, 128, 32
_GIB = 2**30
_ADVICE = {
    "weights": "choose a smaller model, or weights in float8 (--text-backend, --vision-backend)",
    "activations": "lower --max-prefill-tokens or --max-crops-per-step",
    "CUDA graphs": "lower --max-prefill-tokens or --max-crops-per-step, or set --cuda-graphs off",
    "images": "lower --max-batch-size or --max-decoded-image-bytes",
    "image cache": "lower --image-cache-bytes",
    "crop cache": "lower --crop-cache-bytes",
    "adapters": "lower --adapter-slots or --max-adapter-rank",
    "other processes, context and libraries": "end what else uses the memory",
    "margin": "use a device with more memory",
    "what may not be used": "raise --memory-utilization",
}


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that a model needs in addition to its weights."""

    page_bytes: int
    """Bytes of one page of the cache over all layers, keys and values."""
    least_pages: int
    """The fewest pages with which every skill can run."""
    batch_pages: int
    """Pages that a full batch of typical requests uses."""
    activation_bytes: int
    graph_bytes: int
    image_bytes: int
    image_cache_bytes: int = 0
    crop_cache_bytes: int = 0
    adapter_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The memory of a device, now that the weights are in it."""

    total_bytes: int
    available_bytes: int
    """Bytes that can still be allocated."""
    weight_bytes: int
    """Bytes that this process holds for weights and static buffers."""
    is_host: bool
    """True for memory of the host, which has other users."""

    @classmethod
    def of(cls, device: torch.device, weight_bytes: int, limit: int | None = None) -> MemoryReading:
        """Reads the memory of a device. `weight_bytes` is used where the device does not report what this process
        holds, as on the host. A CUDA device counts as having at most `limit` bytes, including those in use.
        """
        if device.type != "cuda":
            total, available = total_memory_bytes(), available_memory_bytes()
            # Weights that are mapped from a file may count as available.
            return cls(total, available, min(weight_bytes, total - available), is_host=True)
        # Free memory that only waits for the garbage collector, or for reuse by torch.
        gc.collect()
        torch.cuda.empty_cache()
        return cls.of_cuda(device, limit)

    @classmethod
    def of_cuda(cls, device: torch.device, limit: int | None) -> MemoryReading:
        """Reads the memory of a CUDA device as it is, also while another thread allocates."""
        available, total = torch.cuda.mem_get_info(device)
        beyond = 0 if limit is None else max(total - limit, 0)
        return cls(total - beyond, max(available - beyond, 0), torch.cuda.memory_reserved(device), is_host=False)

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.available_bytes

    def usable_bytes(self, utilization: float) -> float:
        """Returns the bytes that may still be allocated if this share of the memory may be used."""
        if self.is_host:
            return utilization * self.available_bytes
        return utilization * self.total_bytes - self.used_bytes


def image_cache_bytes(configured: int | None, image_bytes: int, available_bytes: int, *, is_host: bool) -> int:
    """Returns the bytes for cached image embeddings: a whole number of images of `image_bytes` each.

    If no number of bytes is configured: enough for 256 images on a CUDA device and 32 elsewhere, at most a
    sixteenth of what the weights leave.
    """
    num_images = _CACHED_IMAGES_ON_HOST if is_host else _CACHED_IMAGES_ON_DEVICE
    return _whole_items(configured, image_bytes, num_images, available_bytes // _IMAGE_CACHE_SHARE)


def crop_cache_bytes(configured: int | None, crop_bytes: int, available_bytes: int, *, is_host: bool) -> int:
    """Returns the bytes for encoded crops that are kept: a whole number of crops of `crop_bytes` each.

    If no number of bytes is configured: enough for 1,024 crops on a CUDA device and 128 elsewhere, at most a
    thirty-second of what the weights leave.
    """
    num_crops = _CACHED_CROPS_ON_HOST if is_host else _CACHED_CROPS_ON_DEVICE
    return _whole_items(configured, crop_bytes, num_crops, available_bytes // _CROP_CACHE_SHARE)


def _whole_items(configured: int | None, item_bytes: int, num_items: int, most_bytes: int) -> int:
    if not item_bytes:
        return 0
    num_bytes = min(num_items * item_bytes, most_bytes) if configured is None else configured
    return num_bytes // item_bytes * item_bytes


def plan_memory(
    reading: MemoryReading, needs: MemoryNeeds, utilization: float, num_pages: int | None = None
) -> tuple[int, MemoryPlan]:
    """Returns the number of pages of the cache, which is `num_pages` if given, and the plan of the memory.

    Raises `CheckpointError` if the pages cannot hold one request of every skill.
    """
    own_bytes = needs.activation_bytes + needs.graph_bytes + needs.image_bytes + MARGIN_BYTES
    own_bytes += needs.image_cache_bytes + needs.crop_cache_bytes + needs.adapter_bytes
    is_given = num_pages is not None
    if num_pages is None:
        num_pages = max(0, int((reading.usable_bytes(utilization) - own_bytes) // needs.page_bytes))
        if reading.is_host:
            num_pages = min(num_pages, max(needs.batch_pages, needs.least_pages))
    cache_bytes = num_pages * needs.page_bytes
    plan = MemoryPlan(
        total_bytes=reading.total_bytes,
        utilization=utilization,
        weight_bytes=reading.weight_bytes,
        cache_bytes=cache_bytes,
        activation_bytes=needs.activation_bytes,
        graph_bytes=needs.graph_bytes,
        image_bytes=needs.image_bytes,
        image_cache_bytes=needs.image_cache_bytes,
        crop_cache_bytes=needs.crop_cache_bytes,
        adapter_bytes=needs.adapter_bytes,
        other_bytes=reading.used_bytes - reading.weight_bytes,
        margin_bytes=MARGIN_BYTES,
        free_bytes=reading.available_bytes - cache_bytes - own_bytes,
    )
    if num_pages < needs.least_pages:
        unusable = (1 - utilization) * (reading.available_bytes if reading.is_host else reading.total_bytes)
        raise CheckpointError(_too_small(num_pages, needs, plan, int(unusable), is_given=is_given))
    return num_pages, plan


def _too_small(num_pages: int, needs: MemoryNeeds, plan: MemoryPlan, unusable: int, *, is_given: bool) -> str:
    complaint = (
        f"a key-value cache of {num_pages} pages cannot hold one request with an image: "
        f"{needs.least_pages} pages are the least. "
    )
    if is_given:
        return f"{complaint}Ask for more pages (--kv-pages)"
    terms = [(name, num_bytes) for name, num_bytes in plan.terms() if name in _ADVICE]
    terms.append(("what may not be used", unusable))
    largest, _ = max(terms, key=lambda term: term[1])
    listed = ", ".join(f"{name} {num_bytes / _GIB:.2f} GiB" for name, num_bytes in terms)
    return (
        f"{complaint}Of {plan.total_bytes / _GIB:.2f} GiB the largest part is taken by: {largest}. To free memory, "
        f"{_ADVICE[largest]}. The parts: {listed}"
    )
