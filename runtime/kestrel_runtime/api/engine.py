"""The protocol of an engine, and the facts that it reports about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from kestrel_runtime.api.adapters import AdapterInfo, AdapterLoad
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import ImageError, ModelNotFound, SkillUnsupported
from kestrel_runtime.api.images import Image, RawImage
from kestrel_runtime.api.requests import Request
from kestrel_runtime.api.stream import Stream

_GIB = 2**30


class EngineStatus(Enum):
    """The state of the engine towards new requests."""

    SERVING = auto()
    DRAINING = auto()
    """Refuses new requests, finishes those it has."""
    RECOVERING = auto()
    """Refuses new requests while it restarts after a failure; those it has go on afterwards."""
    DEAD = auto()
    """Closed, or stopped by a failure."""


@dataclass(frozen=True, slots=True)
class SkillDefaults:
    """The defaults of a skill's settings."""

    temperature: float
    top_p: float
    max_tokens: int | None = None
    """None where the number of objects limits the answer."""
    max_objects: int | None = None


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
    """Images and their crops: on a CUDA device those that are there, on the host all that are decoded."""
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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The served model and its limits, for discovery."""

    model: str
    revision: str | None
    architecture: str
    skills: Mapping[str, SkillDefaults]
    """The skills by name, in the order in which clients see them."""
    device: str
    dtype: str
    max_context_tokens: int
    max_batch_size: int
    num_parameters: int
    config: EngineConfig
    memory: MemoryPlan | None = None
    """The division of the memory of its device at start; None if nothing was divided."""
    device_uuid: str | None = None
    """Names the GPU to its driver, such as "1a2b3c4d-…"; None on the host."""

    def check(self, request: Request) -> None:
        """Raise `ModelNotFound`, `SkillUnsupported` or `ImageError` for a request that this model cannot serve."""
        if request.options.model not in ("", self.model):
            raise ModelNotFound(request.options.model)
        if request.skill not in self.skills:
            raise SkillUnsupported(request.skill, self.model)
        if request.image is not None:
            self.check_image(request.image)

    def check_image(self, image: Image) -> None:
        """Raise `ImageError` for an image of too many bytes."""
        num_bytes = image.padded_bytes if isinstance(image, RawImage) else len(image)
        if num_bytes > self.config.max_image_bytes:
            raise ImageError(f"the image must not exceed {self.config.max_image_bytes} bytes", too_large=True)


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """A reading of one cache. Counts are since the engine started; a cache that is off has `total_bytes` 0."""

    num_lookups: int = 0
    """Requests that looked into the cache."""
    num_hits: int = 0
    """The number of these requests that found at least a part."""
    num_evictions: int = 0
    """Entries that were dropped to free memory for others."""
    used_bytes: int = 0
    """Memory of entries that can be found, in use or not."""
    total_bytes: int = 0
    """The most memory that entries can take."""
    oldest_age_s: float | None = None
    """Time since the oldest entry was stored, 0 where there is none; None for a cache that is off."""


@dataclass(frozen=True, slots=True)
class ClearedCache:
    """The content that `Engine.clear_cache` or `Engine.forget_image` removed."""

    num_pages: int
    """Pages of the KV cache."""
    num_images: int
    """Images whose embeddings were cached."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The declarations of an image file's header; a recorded orientation is not applied."""

    media_type: str
    """Such as "image/jpeg"."""
    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True)
class Load:
    """A reading of how busy the engine is."""

    num_running: int
    num_waiting: int
    num_preprocessing: int
    num_used_pages: int
    num_pages: int
    tokens_per_second: float
    decoded_image_bytes: int = 0
    """Memory of images that are being decoded or that requests hold."""
    prefix_cache: CacheLoad = CacheLoad()
    """Pages of the KV cache that later requests can use."""
    image_cache: CacheLoad = CacheLoad()
    """Image embeddings that later requests can use."""
    adapters: AdapterLoad = field(default_factory=AdapterLoad)
    num_compilations_awaited: int = 0
    """Kernels that were compiled, or loaded from the folder of compiled ones, since the engine is ready."""
    num_captures_awaited: int = 0
    """Captures of CUDA graphs during which a request came."""
    requests_per_second: float = 0.0
    """Requests that got their whole answer, over the last seconds."""


@dataclass(frozen=True, slots=True)
class CoreReading:
    """A reading of one engine core. An engine in this process is its only core."""

    index: int
    """The number of the core, from 0."""
    status: EngineStatus
    info: EngineInfo | None
    """None until its process has reported it for the first time."""
    load: Load | None
    """None while its process is started again."""
    process_id: int | None
    """None while its process is started again."""


class Engine(Protocol):
    """An engine that has been started."""

    @property
    def info(self) -> EngineInfo:
        """The served model and its limits. Never changes."""
        ...

    @property
    def status(self) -> EngineStatus:
        """Returns True if it takes requests now."""
        ...

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        """Call `callback` at every change, in any thread."""
        ...

    def submit_samples(
        self, request: Request, *, deadline_s: float | None = None, tenant: str = "", namespace: str = ""
    ) -> list[Stream]:
        """Queue a request that must end within `deadline_s` seconds from now, with a stream for each sample.

        Refusals are raised by the streams, before any event; if one sample is refused, none runs. Tenants share
        the engine evenly. Requests of different namespaces never share what is cached.
        """
        ...

    def expecting(
        self, request: Request, *, deadline_s: float | None = None, tenant: str = ""
    ) -> AbstractAsyncContextManager[None]:
        """Entering takes a request, whose image is still being fetched, into the queue or raises why not; leaving
        takes it out."""
        ...

    async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
        """Remove what is cached for a namespace, or for all. Requests that run go on and cache nothing more.

        On an event loop; returns when the engine's thread has done it. Raises `EngineUnavailable`.
        """
        ...

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        """The same for one image of a namespace. `digest`: the SHA-256 of its encoded bytes."""
        ...

    def inspect_image(self, data: bytes) -> ImageInfo:
        """Reads the header of an image file. Raises `ImageError` for a file that requests could not use."""
        ...

    def adapters(self) -> Sequence[AdapterInfo]:
        """The loaded adapters."""
        ...

    async def adapter_names(self) -> Sequence[str]:
        """The names of adapters that requests may use, at most 1,000, in order."""
        ...

    async def load_adapter(self, name: str) -> AdapterInfo:
        """Read an adapter's files anew, and load them where their content is new.

        Raises `AdapterNotFound`, `AdapterInvalid` and `EngineUnavailable`.
        """
        ...

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Free an adapter's slot once no request uses it. Raises `AdapterNotFound` where it is not loaded."""
        ...

    def load(self) -> Load:
        """Returns the load of all cores together."""
        ...

    def cores(self) -> Sequence[CoreReading]:
        """Each of its cores, in the order of their indices."""
        ...

    async def drain(self) -> None:
        """Take no more requests, and return when those that run have ended."""
        ...

    def close(self) -> None:
        """End everything. Blocks."""
        ...
